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
