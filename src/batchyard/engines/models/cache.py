"""Floor 3. The cache folder: model files appear in it whole and checked, or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchyard.errors import ModelError


def cache_folder() -> Path:
    """Where models lie: `BATCHYARD_CACHE`, else the user's cache folder by the platform's custom."""
    given = os.environ.get("BATCHYARD_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "batchyard"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "batchyard"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold *folder* against other processes; whoever comes second finds the work done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ModelError(
            f"Cannot write the model cache {folder}: {error.strerror}. "
            "Make it writable, or set BATCHYARD_CACHE to another folder."
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Write *target* under another name; it gets its own when everything has reached the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        raise ModelError(f"Cannot write {target}: {error.strerror}. Is the disk full?") from error
    finally:
        part.unlink(missing_ok=True)


def copy_hashed(source: BinaryIO, target: BinaryIO, digest: hashlib._Hash) -> None:
    """Copy all of *source*, adding it to *digest*."""
    while block := source.read(1 << 20):
        digest.update(block)
        target.write(block)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
