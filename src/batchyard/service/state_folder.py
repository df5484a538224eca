"""Floor 6. The state folder: everything a Batch needs to go on, in one place, for one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from batchyard.errors import StoreError
from batchyard.stores.segments import SegmentFolder, as_store_error


class StateFolder:
    """A locked state folder (decision 0001). The lock goes with the process, however it ends.

    Raises:
        StoreError: the folder cannot be made, is no state folder, or another process works on it.
    """

    #: Names that may stand in a state folder; anything else means that it is somebody else's folder.
    NAMES = frozenset(
        {
            "state.db",
            "state.db-wal",
            "state.db-shm",
            "lock",
            "requests.jsonl",
            "requests.jsonl.part",
            "segments",
        }
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            strange = sorted({one.name for one in path.iterdir()} - self.NAMES)
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
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    @property
    def requests(self) -> Path:
        """Where requests made of a table's rows are written."""
        return self.path / "requests.jsonl"

    def segments(self, batch_id: str) -> SegmentFolder:
        """The segment files of one Batch."""
        return SegmentFolder(self.path / "segments" / batch_id)

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
        shutil.rmtree(self.segments(batch_id).folder, ignore_errors=True)

    def close(self) -> None:
        """Let go of the lock. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
