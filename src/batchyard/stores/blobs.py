"""Floor 3. Blobs: content under a name, written once, whole or not at all.

Names are paths with `/`. Content is made in a local file first and then put; who reads it gets a local
file too, so that nothing above knows where it really lies.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from batchyard.stores.disk import as_store_error, sync_folder


class BlobNotFound(Exception):  # noqa: N818 - names what failed
    """There is no blob with this name."""


class Blobs(Protocol):
    """Keeps blobs. Calls block.

    Every method raises `StoreError` when the place cannot be used, `StorageFull` when it has no room.
    """

    #: A local folder for content on its way in.
    spool: Path

    def put_file(self, name: str, path: Path) -> None:
        """Make the content of *path* durable as *name*; *path* may be gone afterwards."""
        ...

    def copy(self, name: str, target: str) -> None:
        """Give a blob another name too.

        Raises:
            BlobNotFound: there is none.
        """
        ...

    def local(self, name: str, *, fresh: bool = False) -> Path:
        """A local file with the content of a blob. Not to be changed.

        With *fresh*, the blob may have been put again since it was last asked for.

        Raises:
            BlobNotFound: there is none.
        """
        ...

    def names(self, prefix: str) -> Iterator[str]:
        """The names that begin with *prefix*, a folder's name and `/`."""
        ...

    def delete(self, name: str) -> None:
        """Forget a blob, if there is one."""
        ...

    def delete_all(self, prefix: str) -> None:
        """Forget every blob whose name begins with *prefix*, a folder's name and `/`."""
        ...

    def sweep(self) -> None:
        """Remove local copies that are not needed for now."""
        ...


class LocalBlobs:
    """Blobs as files in a folder, which several processes may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spool = folder / "spool"
        try:
            self.spool.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise as_store_error(error, self.spool) from error

    def __repr__(self) -> str:
        return f"<LocalBlobs {self._folder}>"

    def put_file(self, name: str, path: Path) -> None:
        target = self._folder / name
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            raise as_store_error(error, target) from error

    def copy(self, name: str, target: str) -> None:
        made = self._folder / target
        try:
            made.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                # A second name for the same content: nothing is copied, and deleting one leaves the other.
                os.link(self._folder / name, made)
            sync_folder(made.parent)
        except FileNotFoundError as error:
            raise BlobNotFound(name) from error
        except OSError as error:
            raise as_store_error(error, made) from error

    def local(self, name: str, *, fresh: bool = False) -> Path:  # noqa: ARG002 - the file itself
        path = self._folder / name
        if not path.is_file():
            raise BlobNotFound(name)
        return path

    def names(self, prefix: str) -> Iterator[str]:
        folder = self._folder / prefix
        if folder.is_dir():
            for path in folder.iterdir():
                yield f"{prefix}{path.name}"

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def delete_all(self, prefix: str) -> None:
        shutil.rmtree(self._folder / prefix, ignore_errors=True)

    def sweep(self) -> None:
        """There are no copies; what whoever died had on its way in is removed after a day."""
        before = time.time() - 86_400
        for path in self.spool.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()
