"""Write the generated reference pages, or with `--check` say what is out of date.

    docs/reference/cli.md        every command and option, from the command line itself
    docs/reference/errors.md     every error, from the code's own words
    docs/reference/lifecycle.md  the life of a Batch, drawn from its table
    docs/reference/http-api.md   every path of the server, from the rows that its routes are made of

Also checks that every relative link in the documentation leads somewhere.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main

from batchyard import errors
from batchyard.api.app import every_operation
from batchyard.cli import app
from batchyard.cli.report import ExitCode
from batchyard.service.lifecycle import TERMINAL, TRANSITIONS, Status
from batchyard.types import FaultKind

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
_NOTICE = "<!-- Written by tools/generate_docs.py (`make docs`); edit the code instead. -->\n\n"
_KINDS = {int: "N", Path: "PATH"}
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def cli_page() -> str:
    """Every command with its options."""
    lines = ["# Command line\n", _NOTICE]
    for path, command in _commands("batchyard", typer.main.get_command(app)):
        lines.append(f"## `{path}`\n\n{_text(command.help)}\n")
        rows = [_parameter(one) for one in command.params if one.name != "help"]
        if rows:
            lines.append("| Option | Default | What it does |\n|---|---|---|")
            lines += [f"| {name} | {default} | {text} |" for name, default, text in rows]
            lines.append("")
    return "\n".join(lines)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children or path == "batchyard":
        yield path, command
    for name in sorted(children):
        yield from _commands(f"{path} {name}", children[name])


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        name = f"`{parameter.metavar}`"
    else:
        name = ", ".join(f"`{one}`" for one in parameter.opts)
        if not parameter.is_flag:
            kind = parameter.type_descriptor.annotation
            values = [f"`{one.value}`" for one in kind] if issubclass(kind, Enum) else []
            name += f" {' or '.join(values) or _KINDS.get(kind, 'TEXT')}"
    default = parameter.default
    default = (
        "" if default in {None, False} or callable(default) else f"`{getattr(default, 'value', default)}`"
    )
    return name, default, _text(parameter.help).replace("|", "\\|")


def _text(text: str | None) -> str:
    return re.sub(r"[ \t]*\n(?!\n)[ \t]*", " ", inspect.cleandoc(text or "")).strip()


def errors_page() -> str:
    """Exit codes, errors, faults and line errors."""
    lines = ["# Errors\n", _NOTICE, "## Exit codes\n", "| Code | Meaning |\n|---|---|"]
    meanings = {
        ExitCode.SUCCEEDED: "Every request succeeded.",
        ExitCode.SOME_FAILED: "Some requests failed, or `--fail-over` stopped the run.",
        ExitCode.USAGE: "Bad usage or input; nothing was run.",
        ExitCode.INTERRUPTED: "Interrupted; the same command goes on.",
    }
    lines += [f"| {code.value} | {meanings[code]} |" for code in ExitCode]
    lines += ["\n## Exceptions\n", "| Exception | When |\n|---|---|"]
    for name, one in sorted(vars(errors).items()):
        if inspect.isclass(one) and issubclass(one, Exception):
            lines.append(f"| `{name}` | {_text(one.__doc__).partition(chr(10))[0]} |")
    lines += ["\n## Why a dispatch brings no answer\n"]
    lines += ["Each is retried within limits; the code stands in the error file when it is given up.\n"]
    source = inspect.getsource(FaultKind)
    lines += ["| Kind | Meaning |\n|---|---|"]
    lines += [f"| `{kind}` | {meaning} |" for kind, meaning in re.findall(r'= "(\w+)"  # (.+)', source)]
    lines += ["\n## What can be wrong with a line of an input\n", "| Code | Message |\n|---|---|"]
    lines += [f"| `{code}` | {message} |" for code, message in _line_errors()]
    return "\n".join(lines) + "\n"


def _line_errors() -> list[tuple[str, str]]:
    """Every code and message that intake can give, from its source; values are shown as …."""
    found = set()
    for path in sorted((ROOT / "src/batchyard/service/intake").glob("*.py")):
        for code in re.findall(r'LineError\(\s*"(\w+)"', path.read_text(encoding="utf-8")):
            found.add(code)
    return [(code, _CODES[code]) for code in sorted(found)]


_CODES = {
    "invalid_json_line": "The line is not valid JSON, no JSON object, or no UTF-8.",
    "missing_required_parameter": "A key that every request, or this endpoint, needs is missing.",
    "invalid_type": "A key holds another kind of value than it must.",
    "invalid_value": "A key holds a value that is not allowed.",
    "invalid_url": "The `url` is unknown, or the engine does not answer it.",
    "duplicate_custom_id": "The `custom_id` repeats an earlier line's.",
    "invalid_request": "The body lacks its model or its prompt; on a server also: no such file.",
    "mismatched_model": "A second model, where the engine serves one.",
    "streaming_unsupported": "`stream: true`: results of a Batch are written to a file.",
    "string_above_max_length": "The `custom_id` is too long.",
    "line_too_long": "The line is longer than a request may be.",
    "empty_file": "The input holds no request.",
    "invalid_row": "A row of a table cannot be made into a request.",
    "unreadable_file": "The input cannot be read as what it seems to be.",
}


def lifecycle_page() -> str:
    """The life of a Batch as a chart and a table."""
    lines = ["# The life of a Batch\n", _NOTICE, "```mermaid", "stateDiagram-v2", "    [*] --> validating"]
    lines += [f"    {one} --> {target}: {action}" for (one, action), target in TRANSITIONS.items()]
    lines += [f"    {status} --> [*]" for status in Status if status in TERMINAL]
    lines += ["```\n", "| Status | Meaning | Ends here |\n|---|---|---|"]
    meanings = dict(re.findall(r'= "(\w+)"  # (.+)', inspect.getsource(Status)))
    lines += [
        f"| `{status}` | {meanings[status.value]} | {'yes' if status in TERMINAL else ''} |"
        for status in Status
    ]
    return "\n".join(lines) + "\n"


def http_page() -> str:
    """Every path of the server."""
    lines = ["# Every path\n", _NOTICE]
    lines += [
        "A running server gives the whole, with every type, as `/openapi.json`; what is ours is told in"
    ]
    lines += [
        "[the guide](../guides/batches.md). `/healthz`, `/readyz` and `/openapi.json` ask for no key.\n"
    ]
    lines += ["| Call | What it does | Scope |\n|---|---|---|"]
    nobody: Any = None  # the rows are looked at, not answered
    for one in sorted(every_operation(nobody, nobody), key=lambda row: row.path):
        path = one.path.replace(":path", "")
        scopes = " or ".join(f"`{scope}`" for scope in one.scopes)
        query = ", ".join(f"`{query.name}`" for query in one.query)
        lines.append(f"| `{one.method} {path}` | {one.summary}{f' ({query})' if query else ''} | {scopes} |")
    return "\n".join(lines) + "\n"


def broken_links() -> list[str]:
    """Relative links that lead nowhere."""
    broken: list[str] = []
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for page in pages:
        targets = [one for one in _LINK.findall(page.read_text(encoding="utf-8")) if ":" not in one]
        broken += [
            f"{page.relative_to(ROOT)}: {target} does not exist."
            for target in targets
            if not (page.parent / target).exists()
        ]
    return broken


def main() -> int:
    """Write the pages, or check them; returns the exit code."""
    pages = {"cli.md": cli_page(), "errors.md": errors_page(), "lifecycle.md": lifecycle_page()}
    pages["http-api.md"] = http_page()
    problems = []
    if "--check" in sys.argv:
        problems += [
            f"docs/reference/{name} is out of date. Run: make docs"
            for name, text in pages.items()
            if not (path := REFERENCE / name).exists() or path.read_text(encoding="utf-8") != text
        ]
    else:
        REFERENCE.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (REFERENCE / name).write_text(text, encoding="utf-8")
    problems += broken_links()
    print("\n".join(problems) if problems else "The documentation is up to date and its links hold.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
