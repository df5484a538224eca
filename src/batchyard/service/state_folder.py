"""Floor 6. The state folder: everything a Batch needs to go on, in one place, for one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path

from batchyard.errors import StoreError
from batchyard.stores.blobs import Blobs
from batchyard.stores.disk import as_store_error
from batchyard.stores.segments import SegmentFolder


class StateFolder:
    """A locked state folder (decision 0001). The lock goes with the process, however it ends.

    Args:
        shared: let other processes in that share it too, as those of one PostgreSQL database do.

    Raises:
        StoreError: the folder cannot be made, is no state folder, or another process works on it.
    """

    #: What names in a state folder begin with; any other name means that it is somebody else's folder.
    NAMES = (
        *("state.db", "lock", "requests.", "segments", "partial.", ".partial."),
        *("files", "inputs", "parts", "spool", "cache"),
    )

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self._lock = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            strange = sorted(one.name for one in path.iterdir() if not one.name.startswith(self.NAMES))
        except OSError as error:
            raise as_store_error(error, path) from error
        if strange:
            raise StoreError(
                f"{path} is no state folder of Batchyard: it holds {strange[0]!r}. "
                "Choose another output name."
            )
        try:
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise as_store_error(error, path) from error
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreError(
                f"Another batchyard process is working on {path}. Wait until it ends, or stop it."
            ) from error

    def __repr__(self) -> str:
        return f"<StateFolder {self.path}>"

    @property
    def database(self) -> Path:
        """The database file."""
        return self.path / "state.db"

    def new_requests(self) -> Path:
        """Where requests made of a table's rows are written; a name that no earlier run has."""
        return self.path / f"requests.{uuid.uuid4().hex[:8]}.jsonl"

    @property
    def partial(self) -> tuple[Path, Path]:
        """Where results and errors so far go when a run stops early."""
        return self.path / "partial.jsonl", self.path / "partial.errors.jsonl"

    def holds_results(self) -> bool:
        """Whether any segment holds something."""
        return any(path.stat().st_size for path in (self.path / "segments").glob("*/*.seg"))

    def remove(self) -> None:
        """Remove the whole folder: nothing in it is of use to anybody."""
        self.clear()
        (self.path / "lock").unlink(missing_ok=True)
        self.path.rmdir()

    def segments(self, batch_id: str, blobs: Blobs | None = None) -> SegmentFolder:
        """The segment files of one Batch; those of other machines come through *blobs*."""
        return SegmentFolder(self.path / "segments" / batch_id, blobs, f"segments/{batch_id}/")

    def clear(self) -> None:
        """Remove everything but the lock: the next Batch starts from nothing."""
        for path in self.path.iterdir():
            if path.name == "lock":
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def drop_segments(self, batch_id: str) -> None:
        """Remove the segments of a Batch whose results have been joined."""
        self.segments(batch_id).drop()

    def close(self) -> None:
        """Let go of the lock. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
