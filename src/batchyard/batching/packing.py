"""Floor 1. Which texts share one pass of a model, so that little or nothing is computed for padding.

Pure functions over lengths: they return *packs*, tuples of indices into the lengths given, and never lose
or double an index. The caller puts results back in order through the indices. Knows no model, no clock.

Two costs of a pack are known. *Ragged*: the sum of its lengths, where an engine computes real tokens
only. *Padded*: the longest length times the count, where it pads every text to the longest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchyard.errors import UsageError

Pack = tuple[int, ...]


def pack_by_tokens(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_items: int | None = None,
    padded: bool = False,
    max_lengths: int | None = None,
) -> list[Pack]:
    """Cut the length-sorted list into runs that stay within a token budget.

    Sorting keeps like lengths together, so padded packs waste little; `pack_by_time` finds better cuts at
    more cost. An item that is larger than the budget gets a pack of its own.

    Args:
        lengths: what each item counts, in tokens.
        max_tokens: the most that a pack may cost.
        max_items: the most items in a pack; None for no limit.
        padded: whether a pack costs `longest * items` rather than the sum of its lengths.
        max_lengths: the most different lengths in a pack; None for no limit.
    """
    _check(max_tokens=max_tokens, max_items=max_items, max_lengths=max_lengths)
    packs: list[Pack] = []
    pack: list[int] = []
    tokens = kinds = last = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        # Lengths only rise here, so this one is the longest of its pack.
        cost = length * (len(pack) + 1) if padded else tokens + length
        new_kind = not pack or length != last
        full = len(pack) == max_items or (new_kind and kinds == max_lengths)
        if pack and (full or cost > max_tokens):
            packs.append(tuple(pack))
            pack, tokens, kinds, new_kind = [], 0, 0, True
        pack.append(index)
        tokens += length
        kinds += new_kind
        last = length
    if pack:
        packs.append(tuple(pack))
    return packs


def pack_best_fit(lengths: Sequence[int], *, max_tokens: int, max_items: int | None = None) -> list[Pack]:
    """Fill packs as full as can be under ragged cost: longest first, into the fullest pack that takes it.

    Makes at most 11/9 of the fewest packs possible, plus one. It pays where each dispatch has a cost of
    its own and lengths may be mixed; where lengths in a pack should be alike, use `pack_by_tokens`.
    """
    _check(max_tokens=max_tokens, max_items=max_items)
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        place = bisect_left(open_packs, (length, -1))
        if place < len(open_packs):
            left, number = open_packs.pop(place)
            packs[number].append(index)
        else:
            left, number = max_tokens, len(packs)
            packs.append([index])
        left -= length
        if left > 0 and len(packs[number]) != max_items:
            insort(open_packs, (left, number))
    return [tuple(pack) for pack in packs]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """How long a pass of a model takes, measured on a grid of item counts and lengths.

    Between grid points time is interpolated; beyond the last one it goes on along the last slope.

    Args:
        items: counts that were measured, rising, at least two.
        lengths: longest lengths that were measured, rising, at least two.
        seconds: `seconds[i][j]` for `items[i]` texts of `lengths[j]` tokens.
    """

    items: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.items, self.lengths):
            if len(axis) < 2 or list(axis) != sorted(set(axis)):
                raise UsageError("A grid of pass times needs at least two rising values on each axis.")
        if [len(row) for row in self.seconds] != [len(self.lengths)] * len(self.items):
            raise UsageError("A grid of pass times needs one value for each pair of count and length.")

    def of(self, items: int, longest: int) -> float:
        """Seconds for *items* texts padded to *longest* tokens; never below zero."""
        i, right = _between(self.items, items)
        j, up = _between(self.lengths, longest)
        low = self.seconds[i][j] * (1 - up) + self.seconds[i][j + 1] * up
        high = self.seconds[i + 1][j] * (1 - up) + self.seconds[i + 1][j + 1] * up
        return max(0.0, low * (1 - right) + high * right)


def pack_by_time(lengths: Sequence[int], times: PassTimes, *, max_items: int) -> list[Pack]:
    """Cut the length-sorted list where the measured total time is least, by dynamic programming.

    It pays on padded engines whose time is not proportional to tokens. Cost: `len(lengths) * max_items`
    steps.
    """
    _check(max_items=max_items)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    least = [0.0] * (len(order) + 1)
    cut = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        least[end], cut[end] = min(
            (least[start] + times.of(end - start, longest), start)
            for start in range(max(0, end - max_items), end)
        )
    packs: list[Pack] = []
    end = len(order)
    while end:
        packs.append(tuple(order[cut[end] : end]))
        end = cut[end]
    packs.reverse()
    return packs


def draw_pack(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_items: int | None = None,
    max_lengths: int | None = None,
    window: int = 1024,
) -> Pack:
    """The next pack from a queue in order of arrival, shortest first; empty only if the queue is.

    The oldest item is always in it, so nothing starves. Items nearest to it in length, among the first
    *window*, fill the ragged budget; of several with one length, the oldest come first.
    """
    _check(max_tokens=max_tokens, max_items=max_items, max_lengths=max_lengths)
    if not lengths:
        return ()
    alike: dict[int, list[int]] = {}
    for index in range(min(window, len(lengths))):
        alike.setdefault(lengths[index], []).append(index)
    kinds = sorted(alike)
    up = bisect_left(kinds, lengths[0])
    down = up - 1
    pack: list[int] = []
    tokens = 0
    for _ in range(len(kinds) if max_lengths is None else max_lengths):
        # Of two lengths as near, the shorter one: it leaves more room.
        if down >= 0 and (up == len(kinds) or lengths[0] - kinds[down] <= kinds[up] - lengths[0]):
            length = kinds[down]
            down -= 1
        elif up < len(kinds):
            length = kinds[up]
            up += 1
        else:
            break
        left = max_tokens - tokens
        # Empty texts cost nothing, but ride with nobody who alone is over the budget.
        room = left // length if length else len(lengths) * (left >= 0)
        if max_items is not None:
            room = min(room, max_items - len(pack))
        taken = alike[length][: max(room, 0 if pack else 1)]
        if not taken:
            break
        pack += taken
        tokens += length * len(taken)
    return tuple(sorted(pack, key=lambda index: (lengths[index], index)))


def padding_ratio(lengths: Sequence[int], packs: Iterable[Pack]) -> float:
    """Padded tokens over real tokens, were each pack padded to its longest; 1.0 is no padding."""
    real = computed = 0
    for pack in packs:
        if pack:
            real += sum(lengths[index] for index in pack)
            computed += max(lengths[index] for index in pack) * len(pack)
    return computed / real if real else 1.0


def _between(axis: tuple[int, ...], value: int) -> tuple[int, float]:
    """The grid cell that *value* falls into, and how far along it (beyond the ends: outside 0 to 1)."""
    cell = min(max(bisect_left(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])


def _check(**limits: int | None) -> None:
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise UsageError(f"{name} must be at least 1, not {limit}.")
