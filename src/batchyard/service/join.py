"""Floor 6. The final join: committed segments become the output file and the error file.

Both are written beside their target as `.part`, made durable, then renamed: a reader sees a whole file
or none. Holds one chunk in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from batchyard.stores.protocol import ChunkRecord
from batchyard.stores.segments import SegmentFolder, SegmentRecord, as_store_error, sync_folder


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


def join_committed(
    chunks: Iterable[ChunkRecord], folder: SegmentFolder, output: Path, errors: Path, order: Order
) -> Joined:
    """Write the results of done chunks, given in the order of their commits.

    Raises:
        StorageFull: there is no room; nothing is renamed and the segments stay.
        StoreError: a target cannot be written.
    """
    in_order = sorted(chunks, key=lambda chunk: chunk.no) if order is Order.INPUT else chunks

    def records(chunk: ChunkRecord) -> list[SegmentRecord]:
        found = folder.read(chunk.no, chunk.epoch, chunk.segment_bytes)
        if order is Order.INPUT:
            found.sort(key=lambda record: record.index)
        return found

    return _write(map(records, in_order), output, errors)


def join_partial(chunk_numbers: Iterable[int], folder: SegmentFolder, output: Path, errors: Path) -> Joined:
    """Write whatever is finished so far of these chunks, committed or not, in input order."""

    def records(no: int) -> list[SegmentRecord]:
        return sorted(folder.salvage(no), key=lambda record: record.index)

    return _write(map(records, sorted(chunk_numbers)), output, errors)


def _write(groups: Iterable[list[SegmentRecord]], output: Path, errors: Path) -> Joined:
    parts = {True: output.with_name(output.name + ".part"), False: errors.with_name(errors.name + ".part")}
    targets = {True: output, False: errors}
    lines = {True: 0, False: 0}
    try:
        with ExitStack() as stack:
            files = {kind: stack.enter_context(part.open("wb")) for kind, part in parts.items()}
            for group in groups:
                for kind, file in files.items():
                    chosen = [record.line for record in group if record.succeeded is kind]
                    if chosen:
                        file.write(b"\n".join(chosen) + b"\n")
                        lines[kind] += len(chosen)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for kind, part in parts.items():
            if lines[kind]:
                part.replace(targets[kind])
            else:
                part.unlink()
                targets[kind].unlink(missing_ok=True)
        for parent in {output.parent, errors.parent}:
            sync_folder(parent)
    except OSError as error:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
        raise as_store_error(error, output) from error
    return Joined(
        output if lines[True] else None, errors if lines[False] else None, lines[True], lines[False]
    )
