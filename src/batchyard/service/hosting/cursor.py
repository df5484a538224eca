"""Floor 6. How far a reader of results has come, as a word that the reader keeps. Pure.

It names requests, not positions: whatever a crash does to the order of results, each is given once.
"""

from __future__ import annotations

import base64

import msgspec


class _Kept(msgspec.Struct, array_like=True):
    #: First and last number of runs of chunks that were given whole.
    whole: list[tuple[int, int]]
    #: Of other chunks, which places were given, as the bits of a hexadecimal number.
    some: dict[int, str]


class Cursor:
    """Results that were given, by chunk number and place in the chunk."""

    def __init__(self) -> None:
        self._whole: list[tuple[int, int]] = []
        self._some: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Cursor [{len(self._whole)} runs of chunks, {len(self._some)} chunks in part]>"

    def is_past(self, no: int) -> bool:
        """Whether every result of chunk *no* was given."""
        return any(first <= no <= last for first, last in self._whole)

    def has(self, no: int, place: int) -> bool:
        """Whether this result was given."""
        return bool(self._some.get(no, 0) >> place & 1) or self.is_past(no)

    def add(self, no: int, place: int, count: int) -> None:
        """Note a result as given; its chunk has *count* of them."""
        bits = self._some.get(no, 0) | 1 << place
        if bits == (1 << count) - 1:
            self._some.pop(no, None)
            self._add_whole(no)
        else:
            self._some[no] = bits

    def _add_whole(self, no: int) -> None:
        runs = sorted([*self._whole, (no, no)])
        merged = [runs[0]]
        for first, last in runs[1:]:
            if first == merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self._whole = merged

    def encode(self) -> str:
        """As a word of letters, digits, `-` and `_`."""
        kept = _Kept(self._whole, {no: f"{bits:x}" for no, bits in self._some.items()})
        return base64.urlsafe_b64encode(msgspec.json.encode(kept)).decode().rstrip("=")

    @classmethod
    def decode(cls, word: str) -> Cursor:
        """What `encode` gave; the empty word is the beginning.

        Raises:
            ValueError: it is no such word.
        """
        cursor = cls()
        if word:
            data = base64.urlsafe_b64decode(word.encode("ascii") + b"=" * (-len(word) % 4))
            kept = msgspec.json.decode(data, type=_Kept)
            cursor._whole = sorted(kept.whole)
            cursor._some = {no: int(bits, 16) for no, bits in kept.some.items()}
        return cursor
