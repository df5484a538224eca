"""Floor 6. The input of a Batch while it is worked on: read in place, and never after it has changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from batchyard.errors import InputChanged
from batchyard.stores.protocol import BatchRecord


class InputFile:
    """The registered input, open for reading.

    Same size and modification time are taken as proof that it is unchanged; otherwise its content is
    hashed again. Each read is checked after it was made, so that no altered request is ever dispatched.

    Args:
        path: where it lies now, if not at the Batch's own `input_path`.

    Raises:
        InputChanged: it is gone, or its content is no longer what was registered.
    """

    def __init__(self, batch: BatchRecord, path: Path | None = None) -> None:
        self.path = path or Path(batch.input_path)
        self._sha256 = batch.input_sha256
        self._known = (batch.input_bytes, batch.input_mtime_ns)
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise InputChanged(
                f"The input {self.path} of this run is gone. Put it back, or start over with --restart."
            ) from error
        try:
            self.check()
        except InputChanged:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<InputFile {self.path}>"

    def read(self, offset: int, length: int) -> bytes:
        """*length* bytes at *offset*, as they were registered."""
        data = os.pread(self._handle, length, offset)
        self.check()
        return data

    def check(self) -> None:
        """Make sure that the content is what was registered."""
        found = os.fstat(self._handle)
        now = (found.st_size, found.st_mtime_ns)
        if now == self._known:
            return
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != self._sha256:
                raise InputChanged(
                    f"The content of {self.path} has changed since this run was started. "
                    "Put the old content back, or start over with --restart, or with another -o."
                )
        self._known = now

    def close(self) -> None:
        """Let go of it. Safe to call twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
