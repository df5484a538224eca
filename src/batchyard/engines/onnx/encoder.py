"""Floor 3. Runs packs of texts through the encoder's graph and pools their vectors.

Runs in the engine's child process; knows token ids, not requests. `Encoder.run` may be called by several
threads at once: each call computes on the thread that makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnxruntime

from batchyard.engines.onnx.graph import GROUPS, Precision, cached_graph
from batchyard.engines.onnx.weights import FloatArray, Shape, Weights, read_shape
from batchyard.errors import ModelError

#: Lengths of the texts of the self-test, and how often each rides along.
_SELF_TEST = ((3, 2), (17, 1), (38, 3), (64, 1))
_ERRORS_ONLY = 3


class Encoder:
    """A model, ready to run.

    Args:
        folder: holds `model.safetensors`, `config.json` and, optionally, `1_Pooling/config.json` and
            `sentence_bert_config.json`.
        precision: `fp32` or `int8`.
        cache: where the written graph is kept.
        threads: threads that one call computes on. Calls on several threads at once, each on one, are
            faster than one call on several.

    Raises:
        ModelError: the model is missing, damaged, or of a kind that cannot be run.
    """

    def __init__(self, folder: Path, precision: Precision, cache: Path, *, threads: int = 1) -> None:
        self.shape: Shape = read_shape(folder)
        weights = Weights(folder / "model.safetensors")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        # Each pack has shapes of its own: a memory plan for each would only pile up.
        options.enable_mem_pattern = False
        # Higher levels would put the slow SkipLayerNormalization in.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        for attempt in range(2):
            path = cached_graph(weights, self.shape, precision, cache)
            try:
                self._session = onnxruntime.InferenceSession(
                    path, options, providers=["CPUExecutionProvider"]
                )
                break
            except Exception as error:
                # The file may have been damaged in the cache: the second attempt writes it again.
                path.unlink(missing_ok=True)
                if attempt:
                    raise ModelError(f"ONNX Runtime cannot load the model in {folder}: {error}.") from error

    def run(self, texts: Sequence[npt.NDArray[np.int64]]) -> FloatArray:
        """Vectors of unit length for *texts*, `[texts, width]`, in the order given.

        Args:
            texts: token ids, shortest text first, of at most `GROUPS` different lengths.
        """
        hidden = self._session.run(["hidden"], pack_inputs(texts, self.shape.hidden))[0]
        vectors = np.empty((len(texts), self.shape.hidden), dtype=np.float32)
        start = 0
        for number, text in enumerate(texts):
            rows = hidden[start : start + len(text)]
            vectors[number] = rows[0] if self.shape.pooling == "cls" else rows.mean(axis=0)
            start += len(text)
        # Squares are summed in double, one row at a time: the same bits in every company.
        norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
        return cast("FloatArray", (vectors / np.maximum(norms, 1e-12)).astype(np.float32))

    def is_batch_invariant(self) -> bool:
        """Whether a text alone and in company gets the same vector, bit for bit, on this machine."""
        chance = np.random.default_rng(0)
        texts = [
            chance.integers(0, self.shape.vocabulary, min(length, self.shape.max_tokens))
            for length, count in _SELF_TEST
            for _ in range(count)
        ]
        together = self.run(texts)
        return all(
            np.array_equal(self.run([text])[0], vector) for text, vector in zip(texts, together, strict=True)
        )


def pack_inputs(texts: Sequence[npt.NDArray[np.int64]], hidden: int) -> dict[str, npt.NDArray[Any]]:
    """The graph's inputs for *texts*, which come shortest first.

    `ids` and `positions` hold one number a token; `group_tokens` the tokens of each group of equal
    lengths; `apart_g` and `joined_g` the shape of group g with its texts apart, and as plain rows.
    """
    groups = [(length, sum(1 for _ in same)) for length, same in itertools.groupby(map(len, texts))]
    if len(groups) > GROUPS or groups != sorted(groups):
        raise ValueError(f"a pack takes texts by length, of at most {GROUPS} lengths")
    groups += [(0, 0)] * (GROUPS - len(groups))
    places = np.arange(max(length for length, _ in groups), dtype=np.int64)
    inputs: dict[str, npt.NDArray[Any]] = {
        "ids": np.concatenate(texts),
        "positions": np.concatenate([places[: len(text)] for text in texts]),
        "group_tokens": np.array([length * count for length, count in groups], dtype=np.int64),
    }
    for group, (length, count) in enumerate(groups):
        inputs[f"apart_{group}"] = np.array([count, length, hidden], dtype=np.int64)
        inputs[f"joined_{group}"] = np.array([count * length, hidden], dtype=np.int64)
    return inputs
