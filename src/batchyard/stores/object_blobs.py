"""Floor 3. Blobs in an object store (S3, Google Cloud Storage, Azure), through obstore.

Each process keeps copies of what it has read lately in a local folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from batchyard.errors import StoreError, UsageError
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.disk import as_store_error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

#: A local copy that nobody has asked for so long is removed.
_KEPT_S = 3_600.0
_SCHEMES = ("s3", "gs", "az")


class ObjectBlobs:
    """Blobs as objects.

    Args:
        store: where they lie.
        name: what that is called in messages.
        folder: for content on its way in and for local copies.
    """

    def __init__(self, store: ObjectStore, name: str, folder: Path) -> None:
        self._store = store
        self._name = name
        self._cache = folder / "cache"
        self.spool = folder / "spool"
        try:
            for one in (self._cache, self.spool):
                one.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise as_store_error(error, folder) from error

    def __repr__(self) -> str:
        return f"<{self._name}>"

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of the object store as ours."""
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an optional dependency

        try:
            yield
        except FileNotFoundError as error:
            raise BlobNotFound(name) from error
        except BaseError as error:
            cause = str(error).partition("\n")[0][:300]
            raise StoreError(f"The object store {self._name} failed at {name}: {cause}") from error

    def put_file(self, name: str, path: Path) -> None:
        import obstore  # noqa: PLC0415

        with self._told(name):
            obstore.put(self._store, name, path)
        if path.parent == self.spool:
            path.unlink(missing_ok=True)

    def copy(self, name: str, target: str) -> None:
        import obstore  # noqa: PLC0415

        with self._told(name):
            obstore.copy(self._store, name, target)

    def local(self, name: str, *, fresh: bool = False) -> Path:
        import obstore  # noqa: PLC0415

        path = self._cache / name
        if not fresh and path.exists():
            with suppress(FileNotFoundError):
                os.utime(path)
                return path
        # Beside others who fetch the same: each a file of its own, the last one stays.
        part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
        try:
            with self._told(name):
                answer = obstore.get(self._store, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as file:
                    for piece in answer.stream(min_chunk_size=1 << 20):
                        file.write(piece)
            part.replace(path)
        except OSError as error:
            raise as_store_error(error, path) from error
        finally:
            part.unlink(missing_ok=True)
        return path

    def names(self, prefix: str) -> Iterator[str]:
        import obstore  # noqa: PLC0415

        with self._told(prefix):
            for page in obstore.list(self._store, prefix=prefix.rstrip("/")):
                for one in page:
                    if one["path"].startswith(prefix):
                        yield one["path"]

    def delete(self, name: str) -> None:
        import obstore  # noqa: PLC0415

        (self._cache / name).unlink(missing_ok=True)
        with suppress(BlobNotFound), self._told(name):
            obstore.delete(self._store, name)

    def delete_all(self, prefix: str) -> None:
        import obstore  # noqa: PLC0415

        names = list(self.names(prefix))
        for name in names:
            (self._cache / name).unlink(missing_ok=True)
        if names:
            with suppress(BlobNotFound), self._told(prefix):
                obstore.delete(self._store, names)

    def sweep(self) -> None:
        """Remove local copies that nobody has asked for lately."""
        before = time.time() - _KEPT_S
        for path in self._cache.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_mtime < before:
                    path.unlink()


def open_blobs(url: str, folder: Path) -> ObjectBlobs:
    """The blobs at *url*, such as `s3://bucket/prefix`; credentials and endpoints come from the environment.

    Raises:
        UsageError: it is no such address, or the driver is not installed.
    """
    if urlsplit(url).scheme not in _SCHEMES:
        raise UsageError(f"{url!r} is no place for blobs. Write for example s3://bucket/prefix.")
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError as error:
        raise UsageError("Object storage needs its driver: pip install 'batchyard[s3]'.") from error
    retries: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
    try:
        store = from_url(url, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise UsageError(f"{url!r} cannot be used: {str(error).partition(chr(10))[0]}") from error
    return ObjectBlobs(store, url, folder)
