"""The command line in a process of its own."""

import subprocess
import sys

import pytest


@pytest.fixture
def run_batchyard(tmp_path):
    """Runs `batchyard …` in the test's folder and gives the finished process."""

    def run(*arguments):
        command = [sys.executable, "-m", "batchyard", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)

    return run


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    """Where a server of the test keeps everything: what its settings file says, and options of `keys`."""
    if request.param == "sqlite":
        return ["--state", "state"]
    url = request.getfixturevalue("postgres").new_database()
    # Others take over soon after a kill.
    (tmp_path / "batchyard.toml").write_text(f'database = "{url}"\nlease_s = 1.0\n')
    return ["--database", url]
