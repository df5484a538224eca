"""Floor 3. Reads a model's folder: weights in the safetensors format, and how its vectors are pooled.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives each tensor its
type, shape and byte range, and the bytes (github.com/huggingface/safetensors). Runs in the engine's
child process; knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from batchyard.errors import ModelError

FloatArray = npt.NDArray[np.float32]

_HEADER_CAP = 100_000_000
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}


class Weights:
    """The tensors of one safetensors file, each read when asked for.

    Args:
        path: the `.safetensors` file.

    Raises:
        ModelError: the file is missing, cut short, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelError(f"The model's weights {path} do not exist.") from error
        except (OSError, ValueError) as error:
            raise ModelError(f"The model's weights {path} cannot be read: {error}.") from error
        size = len(self._bytes)
        header_bytes = int.from_bytes(self._bytes[:8], "little")
        if size < 8 or header_bytes > min(_HEADER_CAP, size - 8):
            raise ModelError(f"The model's weights {path} are cut short or damaged. Fetch them again.")
        try:
            header = json.loads(self._bytes[8 : 8 + header_bytes])
        except (ValueError, RecursionError) as error:
            raise ModelError(f"The model's weights {path} are damaged. Fetch them again.") from error
        self._start = 8 + header_bytes
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        end_of_data = 0
        for name, entry in header.items() if isinstance(header, dict) else ():
            if name == "__metadata__":
                continue
            try:
                begin, end = entry["data_offsets"]
                shape = tuple(int(one) for one in entry["shape"])
                dtype = entry["dtype"]
                whole = (
                    0 <= begin <= end
                    and end - begin == int(np.prod(shape, dtype=np.int64)) * _ITEM_BYTES[dtype]
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(f"The model's weights {path} describe tensor {name} wrongly.") from error
            if not whole:
                raise ModelError(f"The model's weights {path} describe tensor {name} wrongly.")
            self._tensors[name] = (dtype, shape, begin, end)
            end_of_data = max(end_of_data, end)
        if self._start + end_of_data > size:
            raise ModelError(
                f"The model's weights {path} are cut short: {size:,} bytes of {self._start + end_of_data:,}. "
                "Fetch them again."
            )
        # Some exports put every tensor under a prefix such as "bert." or "model.".
        marks = [name for name in self._tensors if name.endswith("embeddings.word_embeddings.weight")]
        if len(marks) != 1:
            raise ModelError(f"The model's weights {path} hold no word embeddings, as a BERT encoder does.")
        self._prefix = marks[0].removesuffix("embeddings.word_embeddings.weight")

    def __repr__(self) -> str:
        return f"<Weights of {self.path.name} [{len(self._tensors)} tensors]>"

    def __getitem__(self, name: str) -> FloatArray:
        """Tensor *name* as float32, whatever it is stored as."""
        entry = self._tensors.get(self._prefix + name)
        if entry is None:
            raise ModelError(f"The model's weights {self.path} lack the tensor {self._prefix + name}.")
        dtype, shape, begin, end = entry
        raw = self._bytes[self._start + begin : self._start + end]
        if dtype == "F32":
            array = np.frombuffer(raw, dtype="<f4")
        elif dtype == "F16":
            array = np.frombuffer(raw, dtype="<f2").astype(np.float32)
        elif dtype == "BF16":
            array = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise ModelError(f"Tensor {name} in {self.path} has type {dtype}; F32, F16 and BF16 can be read.")
        if not np.isfinite(array).all():
            raise ModelError(f"Tensor {name} in {self.path} is damaged: not all values are numbers.")
        return cast("FloatArray", array.reshape(shape))

    def digest(self) -> str:
        """SHA-256 of the file, in hex."""
        return hashlib.sha256(self._bytes).hexdigest()


@dataclass(frozen=True, slots=True)
class Shape:
    """What a BERT encoder looks like, read from its folder."""

    layers: int
    heads: int
    hidden: int
    vocabulary: int
    #: The longest input that the model was made for, special tokens included.
    max_tokens: int
    #: The longest input that it can take at all.
    positions: int
    layer_norm_eps: float
    #: `gelu` (exact) or `relu`.
    activation: str
    #: `mean` or `cls`.
    pooling: str
    #: Lengths that vectors may be cut to (Matryoshka training); empty where the model was not trained so.
    dimensions: tuple[int, ...] = ()

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def multiply_adds_per_token(self, attended_tokens: float) -> float:
        """Multiply-adds for one token that attends to *attended_tokens* tokens."""
        return self.layers * (12 * self.hidden * self.hidden + 2 * attended_tokens * self.hidden)


def read_shape(folder: Path) -> Shape:
    """Read `config.json` and its neighbours in *folder*.

    Raises:
        ModelError: a file is missing or damaged, or the model is of a kind that this engine cannot run.
    """
    config = _read_json(folder / "config.json")
    pooling = _read_json(folder / "1_Pooling" / "config.json", optional=True)
    sentence = _read_json(folder / "sentence_bert_config.json", optional=True)
    kind = config.get("model_type")
    if kind != "bert":
        raise ModelError(f"The model in {folder} is of type {kind!r}; the onnx engine runs BERT encoders.")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"The model in {folder} has relative positions; the onnx engine runs absolute ones.")
    activation = config.get("hidden_act")
    if activation not in {"gelu", "relu"}:
        raise ModelError(f"The model in {folder} uses {activation!r}; gelu and relu can be run.")
    if pooling.get("pooling_mode_cls_token"):
        pooled = "cls"
    elif pooling.get("pooling_mode_mean_tokens", True):
        pooled = "mean"
    else:
        raise ModelError(f"The model in {folder} pools in a way that is neither mean nor CLS.")
    try:
        positions = int(config["max_position_embeddings"])
        shape = Shape(
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            hidden=int(config["hidden_size"]),
            vocabulary=int(config["vocab_size"]),
            max_tokens=min(positions, int(sentence.get("max_seq_length") or positions)),
            positions=positions,
            layer_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            activation=activation,
            pooling=pooled,
            dimensions=tuple(int(one) for one in config.get("matryoshka_dimensions", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} lacks or garbles a value: {error}.") from error
    if shape.heads < 1 or shape.hidden % shape.heads:
        raise ModelError(f"{folder / 'config.json'} gives {shape.heads} heads for a width of {shape.hidden}.")
    return shape


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ModelError(f"The model's folder lacks {path}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value
