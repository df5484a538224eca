"""Floor 3. What every file of ours needs: durable names, and the system's errors in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from batchyard.errors import StorageFull, StoreError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def sync_folder(folder: Path) -> None:
    """Make the names in *folder* durable (after create or rename)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_store_error(error: OSError, path: Path) -> StoreError:
    """*error* as one of ours, with where it happened and what to do."""
    if error.errno in _NO_SPACE:
        return StorageFull(f"The disk that holds {path} is full. Free some space, then resume.")
    return StoreError(f"Cannot write {path}: {error.strerror}. Check that the folder exists and is writable.")
