"""The public API gives type checkers what its users expect: no `Any`, and errors where they are due."""

import subprocess
import sys
from pathlib import Path

import pytest

API = Path(__file__).with_name("api.py")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.source


@pytest.mark.parametrize("checker", [["mypy", "--strict", str(API)], ["pyright"]], ids=["mypy", "pyright"])
def test_a_type_checker_accepts_what_is_right_and_refuses_what_is_wrong(checker):
    """Each wrong line in api.py bears an ignore, and both checkers report an ignore that nothing needs."""
    done = subprocess.run(
        [sys.executable, "-m", *checker], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
