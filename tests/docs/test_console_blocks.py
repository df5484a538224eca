"""Every `$ batchyard …` line of the documentation is real: echo runs are run, the others parse."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from batchyard.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page):
    return [match.groups() for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def commands(page):
    for kind, _, text in blocks(page):
        if kind == "console":
            for line in text.splitlines():
                if line.startswith("$ batchyard "):
                    yield shlex.split(line[2:], comments=True)[1:]


WITH_COMMANDS = [page for page in PAGES if list(commands(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_that_need_no_model_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, title, text in blocks(page):
        if title:
            Path(title).write_text(text, encoding="utf-8")
        elif kind == "console" and not any(Path().glob("*.jsonl")):
            Path("in.jsonl").write_text(
                '{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"One","model":"m"}}\n'
            )
    for words in commands(page):
        if words[0] == "run" and "echo" in words:
            monkeypatch.setattr(sys, "argv", ["batchyard", *words])
            done = CliRunner().invoke(app, words, catch_exceptions=False)
            assert done.exit_code == 0, (words, done.output)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_option_that_is_shown_exists(page):
    for words in commands(page):
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known, f"{page.name}: {given - known}"


@pytest.mark.source
def test_the_two_main_commands_are_in_the_readme_and_the_makefile():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"`make {target}`" in readme
        assert f"\n{target}: " in makefile
