"""Floor 3. Writes a BERT encoder as an ONNX graph that computes no padding at all.

The graph takes a *pack*: the tokens of several texts, one text after another, ordered by length. Linear
layers, nine tenths of the work, run over the pack as one matrix. Attention runs over *groups*: texts of
one length, which need neither padding nor a mask. A pack holds up to `GROUPS` different lengths; groups
that are not needed are empty.

So a text meets the same operations with the same shapes, row for row, whatever rides along. Two more
things keep its vector bitwise the same: pooling stays outside of the graph, and int8 gives each row
(token) a scale of its own. One scale for the whole tensor, the usual dynamic quantisation, let
neighbours move a vector by up to 0.04.

Runs in the engine's child process; knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from batchyard.engines.onnx.weights import FloatArray, Shape, Weights
from batchyard.errors import ModelError

Precision = Literal["fp32", "int8"]

#: How many different lengths one pack may hold. Each costs about 0.2 ms a pack in empty operators.
GROUPS = 8

#: Part of the name in the cache: raise it when the graph changes.
GRAPH_VERSION = 2

_OPSET = 17
_IR_VERSION = 8
_MICROSOFT = "com.microsoft"
_LARGEST_FILE = 2**31 - 1

# Rows take 8 bits around 128. Weights take 7: AVX2 adds two products of uint8 and int8 in 16 bits, and
# 2 * 255 * 64 is the most that fits.
_ROW_ZERO = 128
_ROW_STEPS = 127.0
_WEIGHT_STEPS = 63.0
_TINY = 1e-12

# A normalised column rarely passes three of its standard deviations.
_SIGMAS = 3.0
_SMALL = 1e-5


@dataclass(frozen=True, slots=True)
class _Rows:
    """A matrix in int8, and the largest absolute value of each row, which is its scale."""

    values: str
    sizes: str


class _Writer:
    """Collects nodes and constants, and names what flows between them."""

    def __init__(self, weights: Weights, shape: Shape, precision: Precision) -> None:
        self.weights = weights
        self.shape = shape
        self.precision = precision
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype=dtype), name))
        return name

    def scalar(self, value: float, dtype: npt.DTypeLike = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def nodes_out(self, kind: str, inputs: list[str], count: int, **attributes: Any) -> list[str]:
        names = [f"t{len(self.nodes)}_{number}" for number in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes_out(kind, list(inputs), 1, **attributes)[0]

    def rows(self, x: str) -> _Rows:
        """*x*, each row scaled to -1..1 and put into 8 bits."""
        # Two passes for the extremes are quicker than one that writes all absolute values, and a product
        # with the reciprocal is quicker than a division.
        top = self.node("ReduceMax", x, axes=[1], keepdims=1)
        bottom = self.node("Neg", self.node("ReduceMin", x, axes=[1], keepdims=1))
        sizes = self.node("Max", top, bottom, self.scalar(_TINY))
        unit = self.node("Mul", x, self.node("Reciprocal", sizes))
        step, zero = self.scalar(1.0 / _ROW_STEPS), self.scalar(_ROW_ZERO, np.uint8)
        return _Rows(self.node("QuantizeLinear", unit, step, zero), sizes)

    def product(self, x: str | _Rows, weight: FloatArray) -> str:
        """`x @ weight.T`; in int8, each row of *x* and each column of the product has its own scale."""
        if isinstance(x, str):
            return self.node("MatMul", x, self.constant(weight.T))
        scales = np.maximum(np.abs(weight).max(axis=1), _TINY) / _WEIGHT_STEPS
        steps = np.rint(weight / scales[:, None]).T
        product = self.node(
            "MatMulIntegerToFloat",
            x.values,
            self.constant(steps, np.int8),
            self.scalar(1.0 / _ROW_STEPS),
            self.constant(scales),
            self.scalar(_ROW_ZERO, np.uint8),
            domain=_MICROSOFT,
        )
        return self.node("Mul", product, x.sizes)

    def operand(self, x: str) -> str | _Rows:
        """*x* as `product` takes it at this precision."""
        return x if self.precision == "fp32" else self.rows(x)

    def even_product(self, x: str, norm: str, weight: FloatArray) -> str:
        """`product`, where *x* is the outcome of the layer norm *norm*.

        In int8 the columns of *x* are evened out first, and the weight takes up the difference: a few
        columns are many times as large as the others, and would leave those only a few of the 8 bits
        (SmoothQuant, arXiv 2211.10438, with exponent 1/2). How large a column gets is read off the norm's
        own weights, so no sample texts are needed.
        """
        if self.precision == "fp32":
            return self.product(x, weight)
        largest = np.abs(self.weights[norm + ".bias"]) + _SIGMAS * np.abs(self.weights[norm + ".weight"])
        usual = np.sqrt(np.square(weight).mean(axis=0))
        even = np.sqrt(np.maximum(largest, _SMALL) / np.maximum(usual, _SMALL))
        return self.product(self.rows(self.node("Mul", x, self.constant(1.0 / even))), weight * even)


def write_graph(weights: Weights, shape: Shape, precision: Precision) -> bytes:
    """The encoder as the bytes of an ONNX model; see `encoder.pack_inputs` for its inputs.

    Raises:
        ModelError: a tensor is missing, or the graph would pass the 2 GB that the format can hold.
    """
    w = _Writer(weights, shape, precision)
    words = (
        weights["embeddings.word_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
    )
    embedded = w.node("Gather", w.constant(words), "ids")
    placed = w.node("Gather", w.constant(weights["embeddings.position_embeddings.weight"]), "positions")
    norm = "embeddings.LayerNorm"
    x = _normalised(w, norm, embedded, placed)
    for layer in range(shape.layers):
        x, norm = _layer(w, f"encoder.layer.{layer}.", x, norm)
    w.nodes.append(helper.make_node("Identity", [x], ["hidden"]))
    integers = TensorProto.INT64
    graph = helper.make_graph(
        w.nodes,
        "encoder",
        [
            helper.make_tensor_value_info("ids", integers, ["tokens"]),
            helper.make_tensor_value_info("positions", integers, ["tokens"]),
            helper.make_tensor_value_info("group_tokens", integers, [GROUPS]),
            *(helper.make_tensor_value_info(f"apart_{group}", integers, [3]) for group in range(GROUPS)),
            *(helper.make_tensor_value_info(f"joined_{group}", integers, [2]) for group in range(GROUPS)),
        ],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["tokens", shape.hidden])],
        w.constants,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)],
        ir_version=_IR_VERSION,
        producer_name="batchyard",
    )
    if model.ByteSize() > _LARGEST_FILE:
        raise ModelError(f"The model in {weights.path.parent} passes the 2 GB that a graph can hold.")
    return bytes(model.SerializeToString())


def _layer(w: _Writer, at: str, x: str, norm: str) -> tuple[str, str]:
    """One layer of the encoder over *x*, the outcome of *norm*; what comes out, and of which norm."""
    operand = w.operand(x)
    by_part: list[list[str]] = []
    for part in ("query", "key", "value"):
        name = f"{at}attention.self.{part}"
        weight = w.weights[f"{name}.weight"]
        # An error in the values goes into the outcome as it is; one in who attends to whom hardly does,
        # so those two can do with one int8 operand for both.
        product = w.even_product(x, norm, weight) if part == "value" else w.product(operand, weight)
        whole = w.node("Add", product, w.constant(w.weights[f"{name}.bias"]))
        groups = w.nodes_out("Split", [whole, "group_tokens"], GROUPS, axis=0)
        by_part.append(
            [w.node("Reshape", one, f"apart_{group}", allowzero=1) for group, one in enumerate(groups)]
        )
    attended = [
        w.node(
            "Reshape",
            w.node("MultiHeadAttention", query, key, value, domain=_MICROSOFT, num_heads=w.shape.heads),
            f"joined_{group}",
            allowzero=1,
        )
        for group, (query, key, value) in enumerate(zip(*by_part, strict=True))
    ]
    x, norm = _add_and_norm(w, at + "attention.output.", w.node("Concat", *attended, axis=0), x)
    name = at + "intermediate.dense"
    wide = w.even_product(x, norm, w.weights[f"{name}.weight"])
    bias = w.constant(w.weights[f"{name}.bias"])
    if w.shape.activation == "gelu":
        wide = w.node("BiasGelu", wide, bias, domain=_MICROSOFT)
    else:
        wide = w.node("Relu", w.node("Add", wide, bias))
    return _add_and_norm(w, at + "output.", wide, x)


def _add_and_norm(w: _Writer, at: str, x: str, residual: str) -> tuple[str, str]:
    product = w.product(w.operand(x), w.weights[at + "dense.weight"])
    biased = w.node("Add", product, w.constant(w.weights[at + "dense.bias"]))
    return _normalised(w, at + "LayerNorm", biased, residual), at + "LayerNorm"


def _normalised(w: _Writer, at: str, x: str, residual: str) -> str:
    # Add and LayerNormalization are six times as fast as the fused SkipLayerNormalization.
    return w.node(
        "LayerNormalization",
        w.node("Add", x, residual),
        w.constant(w.weights[at + ".weight"]),
        w.constant(w.weights[at + ".bias"]),
        epsilon=w.shape.layer_norm_eps,
    )


def cached_graph(weights: Weights, shape: Shape, precision: Precision, cache: Path) -> Path:
    """The path of the graph in *cache*, written first where it is not there yet.

    The name says what the graph was made from, and a file appears whole or not at all, so processes may
    race for it.

    Raises:
        ModelError: a tensor is missing, or the cache cannot be written.
    """
    settings = f"{shape.layers}x{shape.hidden}x{shape.heads}-{shape.activation}-{shape.layer_norm_eps:g}"
    path = cache / f"{weights.digest()[:32]}-{settings}-{precision}-v{GRAPH_VERSION}.onnx"
    if path.exists():
        return path
    data = write_graph(weights, shape, precision)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, prefix=".", suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
    except OSError as error:
        raise ModelError(f"The graph of the model cannot be written to {cache}: {error}.") from error
    return path
