"""Floor 9. `batchyard keys`: who may ask a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from batchyard.cli.report import ExitCode, Report
from batchyard.clock import SystemClock
from batchyard.errors import StoreError, UsageError
from batchyard.service.hosting.keys import Keys, keys_of

app = typer.Typer(no_args_is_help=True, help="API keys of a server: create, list and revoke them.")

_State = Annotated[Path, typer.Option(help="The server's state folder.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_STATE = Path("batchyard-server")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for, such as a person or a program.")],
    *,
    tenant: Annotated[str, typer.Option(help="Whose files and batches it sees.")] = "default",
    state: _State = DEFAULT_STATE,
    json_output: _Json = False,
) -> None:
    """Make a key and print it. It is shown this once; the server keeps its digest alone."""
    with _keys(state) as keys:
        record, key = keys.create(name, tenant)
    if json_output:
        sys.stdout.write(json.dumps({"id": record.id, "tenant": tenant, "name": name, "key": key}) + "\n")
        return
    sys.stdout.write(f"{key}\n")
    sys.stderr.write(f"Key {record.id} for {name} (tenant {tenant}). Keep it: it is not shown again.\n")


@app.command("list")
def list_keys(*, state: _State = DEFAULT_STATE, json_output: _Json = False) -> None:
    """List the keys, revoked ones included."""
    with _keys(state) as keys:
        found = keys.all()
    if json_output:
        rows = [
            {
                "id": one.id,
                "tenant": one.tenant,
                "name": one.name,
                "hint": one.hint,
                "created_at": int(one.created_at),
                "revoked_at": None if one.revoked_at is None else int(one.revoked_at),
            }
            for one in found
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not found:
        console.print("No keys. Make one with: batchyard keys create NAME")
    for one in found:
        now = "holds" if one.revoked_at is None else f"revoked {_day(one.revoked_at)}"
        made = f"(tenant {one.tenant})  made {_day(one.created_at)}, {now}"
        console.print(f"{one.id}  …{one.hint}  {one.name}  {made}")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="As `list` shows it.")],
    *,
    state: _State = DEFAULT_STATE,
) -> None:
    """Refuse a key from now on; a running server notices within half a second."""
    with _keys(state) as keys:
        if not keys.revoke(key_id):
            error = UsageError(f"There is no key {key_id} that holds. See: batchyard keys list")
            raise typer.Exit(Report(json_events=False).error(error, ExitCode.USAGE))
    sys.stderr.write(f"Key {key_id} is revoked.\n")


@contextmanager
def _keys(state: Path) -> Iterator[Keys]:
    try:
        with keys_of(state, SystemClock()) as keys:
            yield keys
    except StoreError as error:
        raise typer.Exit(Report(json_events=False).error(error, ExitCode.USAGE)) from error


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
