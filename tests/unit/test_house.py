"""The house stands as drawn: floors, names, sizes, and what importing it costs."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import batchyard

PACKAGE = Path(batchyard.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_importing_batchyard_loads_the_standard_library_only():
    script = (
        "import sys; before = set(sys.modules); import batchyard; [getattr(batchyard, n) for n in batchyard.__all__]\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - {'batchyard'}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_sorted_and_there():
    assert list(batchyard.__all__) == sorted(batchyard.__all__)
    for name in batchyard.__all__:
        assert hasattr(batchyard, name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_its_floor_and_stays_small(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 600
    assert path.stem not in {"utils", "util", "common", "core", "manager", "config", "helpers", "misc"}
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    if path.parent != PACKAGE or path.stem in {"types", "errors", "clock", "events"}:
        assert re.match(r"Floor \d[.,] ", docstring), "the first words of a module name its floor"


@pytest.mark.source
def test_imports_only_point_down():
    linter = Path(sys.executable).with_name("lint-imports")
    assert find_spec("importlinter") is not None
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.source
def test_decisions_are_numbered_and_tell_context_choice_and_consequence():
    numbers = []
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        number, _, _ = path.name.partition("-")
        numbers.append(int(number))
        text = path.read_text(encoding="utf-8")
        for heading in ("## Context", "## Choice", "## Consequence", "## What would change our mind"):
            assert heading in text, f"{path.name} has no {heading}"
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.source
def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "generate_docs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
