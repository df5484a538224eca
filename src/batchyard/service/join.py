"""Floor 6. The final join: committed segments become the output file and the error file.

Both are written beside their target under a name of ours, made durable, then renamed: a reader sees a
whole file or none. Holds one chunk in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from batchyard.stores.disk import as_store_error, sync_folder
from batchyard.stores.protocol import ChunkRecord
from batchyard.stores.segments import SegmentFolder, SegmentRecord

#: Marks the line of a request that its Batch's window closed on. No custom_id can hold these bytes: its
#: quotes are escaped.
_EXPIRED = b'"response":null,"error":{"code": "batch_expired"'


class Order(StrEnum):
    """How the lines of an output file follow each other."""

    INPUT = "input"  # as the requests stand in the input
    COMPLETION = "completion"  # as their chunks were finished


@dataclass(frozen=True, slots=True)
class Joined:
    """What the join wrote; a file with no lines is not written at all."""

    output: Path | None
    errors: Path | None
    output_lines: int
    error_lines: int
    output_bytes: int = 0
    error_bytes: int = 0
    #: Whether any request did not run because the window had closed.
    expired: bool = False
    #: The chunks in the order of the files, with where their lines begin in each.
    chunks: tuple[ChunkRecord, ...] = ()


class SegmentsDamaged(Exception):  # noqa: N818 - names what was found
    """Committed segments do not hold what was committed; nothing was written.

    Args:
        numbers: the chunks whose results are not whole.
    """

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(f"{len(numbers)} chunks are damaged")
        self.numbers = numbers


def join_committed(
    chunks: Iterable[ChunkRecord],
    folder: SegmentFolder,
    output: Path,
    errors: Path,
    order: Order,
    *,
    mark: str,
) -> Joined:
    """Write the results of done chunks, given in the order of their commits.

    The files are written under hidden names that hold *mark*, so that nobody else's file is touched
    before the targets are renamed into place.

    Raises:
        SegmentsDamaged: a chunk has not exactly one whole record for each of its requests.
        StorageFull: there is no room; nothing is renamed and the segments stay.
        StoreError: a target cannot be written.
    """
    in_order = sorted(chunks, key=lambda chunk: chunk.no) if order is Order.INPUT else list(chunks)
    damaged: list[int] = []
    attempts: list[dict[str, int] | None] = []

    def records(chunk: ChunkRecord) -> list[SegmentRecord]:
        found = folder.read(chunk.no, chunk.epoch, chunk.segment_bytes)
        if {record.index for record in found} != set(range(chunk.count)) or len(found) != chunk.count:
            damaged.append(chunk.no)
        if order is Order.INPUT:
            found.sort(key=lambda record: record.index)
        repeated = {str(record.index): record.attempts for record in found if record.attempts > 1}
        attempts.append(repeated or None)
        return found

    def check() -> None:
        if damaged:
            raise SegmentsDamaged(damaged)

    joined, places = _write(map(records, in_order), output, errors, mark, check)
    placed = (
        replace(chunk, output_offset=place[True], error_offset=place[False], attempts=tried)
        for chunk, place, tried in zip(in_order, places, attempts, strict=True)
    )
    return replace(joined, chunks=tuple(placed))


def join_partial(chunk_numbers: Iterable[int], folder: SegmentFolder, output: Path, errors: Path) -> Joined:
    """Write whatever is finished so far of these chunks, committed or not, in input order."""

    def records(no: int) -> list[SegmentRecord]:
        return sorted(folder.salvage(no), key=lambda record: record.index)

    return _write(map(records, sorted(chunk_numbers)), output, errors, "partial", lambda: None)[0]


def _write(
    groups: Iterable[list[SegmentRecord]], output: Path, errors: Path, mark: str, check: Callable[[], None]
) -> tuple[Joined, list[dict[bool, int]]]:
    targets = {True: output, False: errors}
    parts = {kind: path.with_name(f".{path.name}.{mark}.part") for kind, path in targets.items()}
    lines = {True: 0, False: 0}
    places: list[dict[bool, int]] = []
    sizes = {True: 0, False: 0}
    expired = False
    try:
        with ExitStack() as stack:
            files = {kind: stack.enter_context(part.open("wb")) for kind, part in parts.items()}
            for group in groups:
                places.append({kind: file.tell() for kind, file in files.items()})
                for kind, file in files.items():
                    chosen = [record.line for record in group if record.succeeded is kind]
                    if chosen:
                        file.write(b"\n".join(chosen) + b"\n")
                        lines[kind] += len(chosen)
                    if not kind and not expired:
                        expired = any(_EXPIRED in line for line in chosen)
            check()
            for kind, file in files.items():
                file.flush()
                sizes[kind] = file.tell()
                os.fsync(file.fileno())
        for kind, part in parts.items():
            if lines[kind]:
                part.replace(targets[kind])
        for parent in {output.parent, errors.parent}:
            sync_folder(parent)
    except OSError as error:
        raise as_store_error(error, output) from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
    joined = Joined(
        output if lines[True] else None,
        errors if lines[False] else None,
        lines[True],
        lines[False],
        sizes[True],
        sizes[False],
        expired,
    )
    return joined, places
