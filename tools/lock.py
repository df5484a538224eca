"""Resolve the version locks in requirements/ from pyproject.toml.

demo.lock holds what `make demo` needs at run time, dev.lock what the tests add. Both carry hashes and
name no registry host, so any mirror serves them.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {
    "demo": ["--extra", "local", "--extra", "parquet", "requirements/build.in"],
    "dev": ["--extra", "all", "--group", "dev", "requirements/build.in"],
}


def main() -> None:
    """Write every lock; with `--upgrade`, to the newest versions that fit."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        for name, sources in LOCKS.items():
            command = [python, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
            command += ["--python-version", "3.11", "--no-emit-index-url", "--no-header", "--no-annotate"]
            command += ["--no-emit-package", "batchyard", "--output-file", f"requirements/{name}.lock"]
            subprocess.run([*command, *sys.argv[1:], "pyproject.toml", *sources], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
