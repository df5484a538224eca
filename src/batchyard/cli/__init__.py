"""Floor 9. The command line: the only place that reads flags, files of settings and the environment."""

from __future__ import annotations

from typing import Annotated

import typer

from batchyard._version import __version__
from batchyard.cli import remote_batches
from batchyard.cli.demo import demo
from batchyard.cli.keys import app as keys
from batchyard.cli.models import app as models
from batchyard.cli.run import run
from batchyard.cli.serve import serve

app = typer.Typer(
    name="batchyard",
    help="The batching layer for AI inference: put any model behind one scheduler.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(value: bool) -> None:  # noqa: FBT001 - typer hands flags over by position
    if value:
        typer.echo(f"batchyard {__version__}")
        raise typer.Exit


@app.callback()
def batchyard(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The batching layer for AI inference: put any model behind one scheduler."""


app.command()(run)
app.command()(serve)
app.command()(demo)
for command in (
    *(remote_batches.submit, remote_batches.status, remote_batches.watch, remote_batches.results),
    *(remote_batches.cancel, remote_batches.pause, remote_batches.resume, remote_batches.amend),
    remote_batches.retry,
):
    app.command(rich_help_panel="Batches of a server")(command)
app.command("list", rich_help_panel="Batches of a server")(remote_batches.list_batches)
app.add_typer(models, name="models")
app.add_typer(keys, name="keys")

__all__ = ["app"]
