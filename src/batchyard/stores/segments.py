"""Floor 3. Segment files: where results are the moment they are known.

One append-only file for each attempt at a chunk (decision 0001). A record is one line:

    <index in chunk> <S|E> <input tokens> <output tokens> <cached tokens> <crc32, 8 hex> <output line>

`S` goes to the output file, `E` to the error file; a number after it says how many attempts it took, if
more than one (`S3`). The checksum covers the output line, so that a torn
or zero-filled tail after a crash is told from a whole record.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from batchyard.stores.blobs import BlobNotFound, Blobs
from batchyard.stores.disk import as_store_error, sync_folder
from batchyard.types import Usage


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One finished request."""

    #: 0-based place in the chunk.
    index: int
    succeeded: bool
    usage: Usage
    #: The output line, ASCII, without its newline.
    line: bytes
    #: Dispatches that it took.
    attempts: int = 1


def encode_record(index: int, *, succeeded: bool, usage: Usage, line: bytes, attempts: int = 1) -> bytes:
    """The bytes of one record, newline included. *line* must hold no newline."""
    kind = b"S" if succeeded else b"E"
    return b"%d %b %d %d %d %08x %b\n" % (
        index,
        kind if attempts == 1 else b"%b%d" % (kind, attempts),
        usage.input_tokens,
        usage.output_tokens,
        usage.cached_tokens,
        crc32(line),
        line,
    )


def decode_records(data: bytes) -> Iterator[SegmentRecord]:
    """Every whole record in *data*, in order; torn or damaged ones are passed over."""
    for raw in data.split(b"\n")[:-1]:
        parts = raw.split(b" ", 6)
        if len(parts) != 7 or parts[1][:1] not in {b"S", b"E"}:
            continue
        try:
            index, *tokens = (int(parts[i]) for i in (0, 2, 3, 4))
            attempts = int(parts[1][1:] or b"1")
            checksum = int(parts[5], 16)
        except ValueError:
            continue
        if checksum == crc32(parts[6]):
            yield SegmentRecord(index, parts[1][:1] == b"S", Usage(*tokens), parts[6], attempts)


class SegmentFolder:
    """The segment files of one Batch.

    Args:
        folder: where they are written.
        blobs: where they go when other machines must see them too; None where *folder* is all there is.
        prefix: what their names in *blobs* begin with.
    """

    def __init__(self, folder: Path, blobs: Blobs | None = None, prefix: str = "") -> None:
        self.folder = folder
        self._blobs = blobs
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<SegmentFolder {self.folder}>"

    @property
    def published(self) -> bool:
        """Whether what is written here must be published before others see it."""
        return self._blobs is not None

    def publish(self, path: Path) -> None:
        """Let other machines see what a segment holds so far."""
        if self._blobs is not None:
            self._blobs.put_file(self._prefix + path.name, path)

    def _gather(self, no: int, name: str = "") -> None:
        """Fetch the segments of chunk *no* that other machines wrote, or the one of this *name* only."""
        if self._blobs is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for one in [self._prefix + name] if name else list(self._blobs.names(self._prefix)):
            path = self.folder / one.removeprefix(self._prefix)
            if not path.name.startswith(f"{no:06d}."):
                continue
            with suppress(BlobNotFound):
                there = self._blobs.local(one, fresh=True)
                # What is written here is never behind what was published of it.
                if not path.exists() or path.stat().st_size < there.stat().st_size:
                    shutil.copyfile(there, path)

    def path(self, no: int, epoch: int) -> Path:
        """Where the attempt *epoch* at chunk *no* is written."""
        return self.folder / f"{no:06d}.{epoch}.seg"

    def create(self, no: int, epoch: int) -> SegmentWriter:
        """A new, empty segment for this attempt."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.path(no, epoch)
            # No O_EXCL: an epoch is claimed once, so what lies here is of a crash before its first record.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise as_store_error(error, self.folder) from error
        return SegmentWriter(path, handle)

    def salvage(self, no: int, before_epoch: int | None = None) -> list[SegmentRecord]:
        """What attempts at chunk *no* (before *before_epoch*) finished: the first whole record an index."""
        self._gather(no)
        found: dict[int, SegmentRecord] = {}
        for path in sorted(self.folder.glob(f"{no:06d}.*.seg"), key=_epoch_of):
            if before_epoch is None or _epoch_of(path) < before_epoch:
                for record in decode_records(path.read_bytes()):
                    found.setdefault(record.index, record)
        return list(found.values())

    def drop_before(self, no: int, epoch: int) -> None:
        """Remove the files of attempts before *epoch*: what they held has been copied."""
        for path in self.folder.glob(f"{no:06d}.*.seg"):
            if _epoch_of(path) < epoch:
                path.unlink(missing_ok=True)
                if self._blobs is not None:
                    self._blobs.delete(self._prefix + path.name)

    def drop(self) -> None:
        """Remove them all."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._blobs is not None:
            self._blobs.delete_all(self._prefix)

    def read(self, no: int, epoch: int, length: int | None = None) -> list[SegmentRecord]:
        """The whole records of one attempt, of its first *length* bytes; none where the file is gone."""
        self._gather(no, self.path(no, epoch).name)
        try:
            data = self.path(no, epoch).read_bytes()
        except FileNotFoundError:
            return []
        return list(decode_records(data if length is None else data[:length]))

    def numbers(self) -> set[int]:
        """The chunks that have a file here."""
        return {int(path.name.split(".")[0]) for path in self.folder.glob("*.seg")}

    def sync(self) -> None:
        """Make the folder's entries durable."""
        sync_folder(self.folder)


class SegmentWriter:
    """One open segment. Records are with the kernel when `append` returns, on the disk after `sync`."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.written_bytes = 0
        self.synced_bytes = 0
        self._torn = False
        self._handle = handle

    def __repr__(self) -> str:
        return f"<SegmentWriter {self.path.name} [{self.synced_bytes} of {self.written_bytes} bytes synced]>"

    def append(self, records: bytes) -> None:
        """Append whole records.

        Raises:
            StorageFull: there is no room; what did not fit is torn and will be passed over.
        """
        # A newline first ends a record that an earlier attempt left torn, so that it spoils no other.
        view = memoryview(b"\n" + records if self._torn else records)
        self._torn = True
        try:
            while view:
                written = os.write(self._handle, view)
                self.written_bytes += written
                view = view[written:]
            self._torn = False
        except OSError as error:
            raise as_store_error(error, self.path) from error

    def sync(self) -> None:
        """Make everything appended so far durable."""
        length = self.written_bytes
        if length == self.synced_bytes:
            return
        try:
            os.fdatasync(self._handle) if hasattr(os, "fdatasync") else os.fsync(self._handle)
        except OSError as error:
            raise as_store_error(error, self.path) from error
        self.synced_bytes = length

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _epoch_of(path: Path) -> int:
    return int(path.name.split(".")[1])
