"""Floor 6. The bytes of an input: opened with care, read in blocks, split into lines of bounded length.

Knows nothing of requests or rows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from batchyard.errors import UsageError

BOM = b"\xef\xbb\xbf"
#: Longest line taken. A request with several images as base64 fits; a file without newlines does not.
MAX_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
#: What other kinds of files start with, and what to do with them.
_FOREIGN = (
    (b"\x1f\x8b", "is compressed with gzip. Unpack it first: gunzip --keep {name}"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd. Unpack it first: unzstd {name}"),
    (b"PK\x03\x04", "is a ZIP archive or a spreadsheet. Unpack it, or save the table as CSV."),
    (b"\xff\xfe", "is UTF-16. Save it as UTF-8."),
    (b"\xfe\xff", "is UTF-16. Save it as UTF-8."),
)


def open_input(path: Path) -> int:
    """A descriptor to read *path* with.

    Raises:
        UsageError: it is missing, unreadable, no regular file, or plainly of a format that is not read.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a folder. Name one file in it.")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is no regular file. A run reads its input again, so save it to a file.")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from error
    head = os.pread(handle, 8, 0)
    advice = next((words for mark, words in _FOREIGN if head.startswith(mark)), None)
    if advice is not None:
        os.close(handle)
        raise UsageError(f"{path} {advice.format(name=path.name)}")
    return handle


def unreadable(path: Path, error: OSError) -> UsageError:
    """The error of a file that cannot be read, in words."""
    if isinstance(error, FileNotFoundError):
        return UsageError(f"The input {path} does not exist. Check the path.")
    if isinstance(error, PermissionError):
        return UsageError(f"The input {path} may not be read. Check its permissions.")
    return UsageError(f"The input {path} cannot be read: {error.strerror or error}.")


def blocks(handle: int, on_progress: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The whole file from its start, in blocks; *on_progress* hears how many bytes were read."""
    os.lseek(handle, 0, os.SEEK_SET)
    read = 0
    while block := os.read(handle, _BLOCK_BYTES):
        read += len(block)
        yield block
        if on_progress is not None:
            on_progress(read)


def numbered_lines(found: Iterator[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | int]]:
    """Numbered lines of a stream of blocks, from 1, without newline and BOM.

    A line longer than *max_line_bytes* is dropped while it is read; its length is given in its place.
    """
    number, rest, skipped, fresh = 0, b"", 0, True
    for block in found:
        lines = block.split(b"\n")
        if skipped:
            skipped += len(lines[0])
            if len(lines) == 1:
                continue
            number += 1
            yield number, skipped
            skipped = 0
            del lines[0]
        else:
            lines[0] = rest + lines[0]
        if fresh and (len(lines) > 1 or len(lines[0]) >= len(BOM)):
            fresh = False
            lines[0] = lines[0].removeprefix(BOM)
        rest = lines.pop()
        for raw in lines:
            number += 1
            yield number, raw if len(raw) <= max_line_bytes else len(raw)
        # Room for a BOM that has not come whole yet.
        if len(rest) > max(max_line_bytes, len(BOM)):
            skipped, rest = len(rest), b""
    if skipped:
        yield number + 1, skipped
    elif rest:
        yield number + 1, rest if len(rest) <= max_line_bytes else len(rest)
