"""Floor 9. `batchyard keys`: who may ask a server, and for what."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from batchyard.cli.report import ExitCode, Report
from batchyard.cli.settings import read_settings
from batchyard.clock import SystemClock
from batchyard.errors import StoreError, UsageError
from batchyard.service.hosting.keys import Keys, Rights, Scope, keys_of
from batchyard.stores.protocol import KeyRecord

app = typer.Typer(no_args_is_help=True, help="API keys of a server: create, list, change and revoke them.")

_State = Annotated[
    Path | None, typer.Option(help="The server's state folder. Default: as batchyard.toml says.")
]
_Database = Annotated[
    str | None,
    typer.Option(envvar="BATCHYARD_DATABASE", help="The server's PostgreSQL database, where it has one."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As `list` shows it.")]
_Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        help=f"What it may be used for; may be repeated: {', '.join(Scope)}. Default: anything.",
    ),
]
_Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model that it may use; may be repeated. Default: any."),
]
_Rate = Annotated[int | None, typer.Option("--requests-per-minute", help="How fast it may ask.")]
_Batches = Annotated[
    int | None, typer.Option("--max-batches", help="How many batches may run at once; more wait.")
]
_Tokens = Annotated[
    int | None,
    typer.Option("--max-enqueued-tokens", help="How many prompt tokens may be enqueued; more wait."),
]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for, such as a person or a program.")],
    *,
    tenant: Annotated[str, typer.Option(help="Whose files and batches it sees.")] = "default",
    scopes: _Scopes = None,
    models: _Models = None,
    requests_per_minute: _Rate = None,
    max_batches: _Batches = None,
    max_enqueued_tokens: _Tokens = None,
    state: _State = None,
    database: _Database = None,
    json_output: _Json = False,
) -> None:
    """Make a key and print it. It is shown this once; the server keeps its digest alone."""
    rights = Rights(scopes, models, requests_per_minute, max_batches, max_enqueued_tokens)
    with _keys(state, database) as keys:
        record, key = keys.create(name, tenant, rights)
    if json_output:
        sys.stdout.write(json.dumps(_shown(record) | {"key": key}) + "\n")
        return
    sys.stdout.write(f"{key}\n")
    sys.stderr.write(f"Key {record.id} for {name} (tenant {tenant}). Keep it: it is not shown again.\n")


@app.command("list")
def list_keys(*, state: _State = None, database: _Database = None, json_output: _Json = False) -> None:
    """List the keys, revoked ones included."""
    with _keys(state, database) as keys:
        found = keys.all()
    if json_output:
        sys.stdout.write(json.dumps([_shown(one) for one in found], indent=2) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not found:
        console.print("No keys. Make one with: batchyard keys create NAME")
    for one in found:
        now = "holds" if one.revoked_at is None else f"revoked {_day(one.revoked_at)}"
        made = f"(tenant {one.tenant})  made {_day(one.created_at)}, {now}{_rights(one)}"
        console.print(f"{one.id}  …{one.hint}  {one.name}  {made}")


@app.command()
def change(
    key_id: _KeyId,
    *,
    scopes: _Scopes = None,
    models: _Models = None,
    requests_per_minute: _Rate = None,
    max_batches: _Batches = None,
    max_enqueued_tokens: _Tokens = None,
    state: _State = None,
    database: _Database = None,
) -> None:
    """Give a key other rights. What runs with it is held if it may not go on."""
    rights = Rights(scopes, models, requests_per_minute, max_batches, max_enqueued_tokens)
    with _keys(state, database) as keys:
        if not keys.change(key_id, rights):
            raise UsageError(f"There is no key {key_id} that holds. See: batchyard keys list")
    sys.stderr.write(f"Key {key_id} is changed.\n")


@app.command()
def revoke(key_id: _KeyId, *, state: _State = None, database: _Database = None) -> None:
    """Refuse a key from now on; a running server notices within half a second and holds its batches."""
    with _keys(state, database) as keys:
        if not keys.revoke(key_id):
            raise UsageError(f"There is no key {key_id} that holds. See: batchyard keys list")
    sys.stderr.write(f"Key {key_id} is revoked.\n")


@contextmanager
def _keys(state: Path | None, database: str | None) -> Iterator[Keys]:
    try:
        settings = read_settings()
        # A folder that was named is meant, whatever the settings say of a database.
        url = database or (settings.database if state is None else None)
        with keys_of(state or Path(settings.state), SystemClock(), url) as keys:
            yield keys
    except (StoreError, UsageError) as error:
        raise typer.Exit(Report(json_events=False).error(error, ExitCode.USAGE)) from error


def _shown(record: KeyRecord) -> dict[str, Any]:
    shown = asdict(record)
    del shown["digest"]
    for name in ("created_at", "revoked_at"):
        shown[name] = None if shown[name] is None else int(shown[name])
    return shown


def _rights(record: KeyRecord) -> str:
    words = [
        record.scopes and "for " + ", ".join(record.scopes),
        record.models and "models " + ", ".join(record.models),
        record.requests_per_minute and f"{record.requests_per_minute:,} requests a minute",
        record.max_batches and f"{record.max_batches:,} batches",
        record.max_enqueued_tokens and f"{record.max_enqueued_tokens:,} tokens enqueued",
    ]
    return "".join(f"; {one}" for one in words if one)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
