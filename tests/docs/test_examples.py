"""Every example, and every block of Python in the documentation, runs to its end."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8")))
]


def runs(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path):
    needs = re.search(r"Needs: ([\w, ]+)\.", path.read_text(encoding="utf-8"))
    for package in needs[1].split(", ") if needs else ():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    runs(str(path))


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_documentation_runs(block):
    runs("-c", block)
