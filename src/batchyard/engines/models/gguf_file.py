"""Floor 3. Looking at a GGUF file before it is loaded: is it whole, and what does it say of itself.

The header is read here, in tens of milliseconds; the gguf package's reader takes seconds, since it keeps
every token of the vocabulary. Format: GGUF specification, versions 2 and 3 (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchyard.errors import ModelError

_MAGIC = b"GGUF"
#: struct formats of the value types by their number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What an engine needs to know of a model file."""

    #: Tokens that the model was trained to take, prompt and output together.
    trained_context: int | None
    has_chat_template: bool
    tensors: int


def check_gguf(path: Path) -> GgufFacts:
    """What *path* says of itself.

    Raises:
        ModelError: it is missing, no GGUF file, or cut short.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(
                    f"{path} is no GGUF file. The engine llama loads models in the GGUF format only."
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).facts()
    except OSError as error:
        raise ModelError(f"Cannot read the model {path}: {error.strerror}.") from error
    except (struct.error, ValueError, KeyError, IndexError) as error:
        size = path.stat().st_size
        raise ModelError(
            f"The model {path} is damaged or cut short ({size:,} bytes). Fetch it again."
        ) from error


class _Header:
    """A reader over the bytes of one file; every read past the end raises."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def facts(self) -> GgufFacts:
        version = self._scalar("I")
        if version not in {2, 3}:
            raise ValueError(version)
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        known: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            known[key] = self._value(self._scalar("I"))
        alignment = known.get("general.alignment", 32)
        ends = [offset + size for offset, size in self._tensors(tensors)]
        start = -(-self._at // alignment) * alignment
        if start + max(ends, default=0) > len(self._data):
            raise ValueError(start)
        context = known.get(f"{known.get('general.architecture')}.context_length")
        return GgufFacts(context, "tokenizer.chat_template" in known, tensors)

    def _tensors(self, count: int) -> Iterator[tuple[int, int]]:
        """Offset and size in bytes of each tensor, from the start of the data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - brings numpy

        for _ in range(count):
            self._string()
            elements = 1
            for _ in range(self._scalar("I")):
                elements *= self._scalar("Q")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self._scalar("I"))]
            yield self._scalar("Q"), elements // block * block_bytes

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _take(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise IndexError(length)
        self._at += length
        return found

    def _value(self, kind: int) -> Any:
        """A value; long arrays are only passed over."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        element, count = self._scalar("I"), self._scalar("Q")
        if element in _SCALARS:
            self._take(struct.calcsize("<" + _SCALARS[element]) * count)
        else:
            for _ in range(count):
                self._value(element)
        return None
