"""Floor 9. Batches of a server: submit, list, status, watch, results, cancel, pause, resume, amend, retry."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from batchyard.cli.remote import DEFAULT_SERVER, JsonOption, KeyEnvOption, Remote, ServerOption
from batchyard.cli.remote_follow import follow as follow_results
from batchyard.cli.remote_follow import watch as follow_progress
from batchyard.cli.remote_follow import what_is_there
from batchyard.cli.remote_words import estimate_lines, row, show, status_lines
from batchyard.cli.report import ExitCode, Report
from batchyard.cli.values import canary_policy, json_object
from batchyard.errors import BatchyardError, UsageError
from batchyard.scheduling.order import OrderName

_BatchId = Annotated[str, typer.Argument(metavar="BATCH_ID", help="As `submit` and `list` show it.")]
_Metadata = Annotated[list[str] | None, typer.Option("--metadata", help="A pair KEY=VALUE; may be repeated.")]


def submit(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests as OpenAI batch JSONL.")],
    *,
    endpoint: Annotated[
        str | None, typer.Option(help="Such as /v1/embeddings. Default: that of the first request.")
    ] = None,
    window: Annotated[str, typer.Option(help="Until when it must be done: 1m to 7d.")] = "24h",
    priority: Annotated[int, typer.Option(help="Larger goes first.")] = 0,
    metadata: _Metadata = None,
    fail_over: Annotated[
        str | None, typer.Option(help="Hold it when more of the first requests fail: 5% (of 100) or 5%/500.")
    ] = None,
    several_models: Annotated[
        bool, typer.Option("--several-models", help="Let requests name different models.")
    ] = False,
    work_order: Annotated[
        OrderName,
        typer.Option(help="The order of work: prefix keeps prompts that begin alike together."),
    ] = OrderName.AUTO,
    dedupe: Annotated[
        bool | None,
        typer.Option(
            help="Ask what is alike to the byte once: all or nothing. Default: embeddings and temperature 0."
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Check it and estimate; make nothing.")
    ] = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Watch it until it has ended.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Send a file of requests to a server, as a batch."""

    async def act(remote: Remote) -> int:
        wanted: dict[str, Any] = {
            "endpoint": endpoint or _first_url(source),
            "completion_window": window,
            "metadata": _pairs(metadata) or None,
            "priority": priority,
            "several_models": several_models,
            "work_order": work_order.value,
            "dedupe": dedupe,
        }
        if fail_over is not None:
            policy = canary_policy(fail_over)
            wanted["canary"] = {"first": policy.first, "max_failed_share": policy.max_failed_share}
        file = await remote.upload(source)
        wanted["input_file_id"] = file["id"]
        made: dict[str, Any] | None = None
        try:
            path = "/batchyard/estimate" if estimate else "/batches"
            made = await remote.call("POST", path, wanted)
        finally:
            if made is None or estimate:
                await remote.call("DELETE", f"/files/{file['id']}")
        if estimate:
            show(made, json_output, estimate_lines)
            return ExitCode.SUCCEEDED if made["valid"] else ExitCode.USAGE
        if watch_it:
            return await follow_progress(remote, made["id"], json_output=json_output)
        show(made, json_output, lambda one: [one["id"]])
        return ExitCode.SUCCEEDED

    _run(server, api_key_env, act)


def list_batches(
    *,
    status: Annotated[
        str | None, typer.Option(help="Only these, with commas between: in_progress,paused.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only batches of this model.")] = None,
    metadata: _Metadata = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 20,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """List the batches of a server, newest first."""

    async def act(remote: Remote) -> int:
        params = {f"metadata[{key}]": value for key, value in _pairs(metadata).items()}
        params |= {key: value for key, value in (("status", status), ("model", model)) if value}
        found: list[dict[str, Any]] = []
        more = True
        while more and len(found) < limit:
            params["limit"] = str(min(limit - len(found), 100))
            page = await remote.call("GET", "/batches", params=params)
            found += page["data"]
            more = page["has_more"]
            params["after"] = page["last_id"] or ""
        show(found, json_output, lambda rows: [row(one) for one in rows] or ["No batches."])
        return ExitCode.SUCCEEDED

    _run(server, api_key_env, act)


def status(
    batch_id: _BatchId,
    *,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show where a batch stands, and what failed."""

    async def act(remote: Remote) -> int:
        batch = await remote.call("GET", f"/batches/{batch_id}")
        failures = await remote.call("GET", f"/batches/{batch_id}/errors")
        show(batch | {"failures": failures["data"]}, json_output, status_lines)
        return ExitCode.SUCCEEDED

    _run(server, api_key_env, act)


def watch(
    batch_id: _BatchId,
    *,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print an event a second as JSON.")] = False,
) -> None:
    """Watch a batch until it has ended. Ctrl-C stops the watching, not the batch.

    Ends with 0 when every request succeeded, 1 when the batch has ended otherwise, 3 when interrupted.
    """
    _run(server, api_key_env, lambda remote: follow_progress(remote, batch_id, json_output=json_output))


def results(
    batch_id: _BatchId,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write them there instead of to standard output.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with results as they come, until the batch ends.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only requests that failed or never ran.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Print the results that a batch has by now, one JSON object a line, each once."""

    async def act(remote: Remote) -> int:
        with _target(output) as file:

            def write(line: str) -> None:
                found = json.loads(line)
                good = found["response"] is not None and 200 <= found["response"]["status_code"] < 300
                if not failed or not good:
                    file.write(line + "\n")

            await (follow_results if follow else what_is_there)(remote, batch_id, write, file.flush)
        return ExitCode.SUCCEEDED

    _run(server, api_key_env, act)


def cancel(
    batch_id: _BatchId,
    *,
    request: Annotated[
        list[str] | None,
        typer.Option("--request", help="Only the request with this custom_id; may be repeated."),
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only the requests whose custom_id begins so.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Cancel a batch, or some of its requests. What is finished is kept."""

    async def act(remote: Remote) -> int:
        if request is None and prefix is None:
            batch = await remote.call("POST", f"/batches/{batch_id}/cancel")
            show(batch, json_output, lambda one: [f"{one['id']} is {one['status']}."])
            return ExitCode.SUCCEEDED
        wanted = {"custom_ids": request} if request else {"custom_id_prefix": prefix}
        found = await remote.call("POST", f"/batches/{batch_id}/requests/cancel", wanted)
        show(found, json_output, lambda one: [f"Cancelled {one['matched']:,}, as far as they had not ended."])
        if found["unknown"]:
            raise UsageError(f"The batch has no request {found['unknown'][0]!r}. The others are cancelled.")
        return ExitCode.SUCCEEDED

    _run(server, api_key_env, act)


def pause(
    batch_id: _BatchId,
    *,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Hold a batch: nothing more is dispatched until it is resumed."""
    _act(server, api_key_env, f"/batches/{batch_id}/pause", {}, json_output=json_output)


def resume(
    batch_id: _BatchId,
    *,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Go on with a batch that is held."""
    _act(server, api_key_env, f"/batches/{batch_id}/resume", {}, json_output=json_output)


def amend(
    batch_id: _BatchId,
    *,
    body: Annotated[
        str | None,
        typer.Option(help="Merged into the body of each request, as JSON; null removes: '{\"seed\": null}'."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Ask this model instead.")] = None,
    replace: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="Replace this text in prompts."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Change those requests of a batch that have not run yet."""
    wanted: dict[str, Any] = {}
    if body is not None:
        try:
            wanted["body"] = json_object(body, "--body")
        except UsageError as error:
            raise typer.Exit(Report(json_events=False).error(error, ExitCode.USAGE)) from error
    if model is not None:
        wanted["model"] = model
    if replace is not None:
        wanted["replace_text"] = [{"find": replace[0], "with": replace[1]}]
    _act(server, api_key_env, f"/batches/{batch_id}/amend", wanted, json_output=json_output)


def retry(
    batch_id: _BatchId,
    *,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="Only failures of this kind, such as 'HTTP 500'; may be repeated."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key_env: KeyEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Run the failed requests of a batch again, as a new batch; prints its id."""
    wanted = {"kinds": kind} if kind else {}

    async def act(remote: Remote) -> int:
        batch = await remote.call("POST", f"/batches/{batch_id}/retry", wanted)
        show(batch, json_output, lambda one: [one["id"]])
        return ExitCode.SUCCEEDED

    _run(server, api_key_env, act)


# --- how ------------------------------------------------------------------------------------------


def _run(server: str, key_env: str | None, act: Callable[[Remote], Awaitable[int]]) -> None:
    async def main() -> int:
        async with Remote(server, key_env) as remote:
            return await act(remote)

    try:
        code = asyncio.run(main())
    except BatchyardError as error:
        code = Report(json_events=False).error(error, ExitCode.USAGE)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read the results has seen enough.
        code = ExitCode.SUCCEEDED
        sys.stderr.close()
    raise typer.Exit(code)


def _act(server: str, key_env: str | None, path: str, body: dict[str, Any], *, json_output: bool) -> None:
    async def act(remote: Remote) -> int:
        batch = await remote.call("POST", path, body)
        show(batch, json_output, lambda one: [f"{one['id']} is {one['status']}."])
        return ExitCode.SUCCEEDED

    _run(server, key_env, act)


class _target:  # noqa: N801 - a context, used like a function
    """Standard output, or a file that is made."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __enter__(self) -> IO[str]:
        if self._path is None:
            self._file: IO[str] = sys.stdout
            return sys.stdout
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{self._path} cannot be written: {error.strerror}. Check the path.") from error
        return self._file

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):
            self._file.flush()
        if self._path is not None:
            self._file.close()


def _pairs(values: list[str] | None) -> dict[str, str]:
    pairs = {}
    for one in values or ():
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise UsageError(f"--metadata {one!r} is no pair. Write for example --metadata team=search.")
        pairs[key] = value
    return pairs


def _first_url(source: Path) -> str:
    """The endpoint that the first request of a file names."""
    try:
        with source.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}. Check the path.") from error
    try:
        url = json.loads(first.removeprefix(b"\xef\xbb\xbf"))["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise UsageError(
            f"{source} does not begin with a request that names its url. It must be OpenAI batch JSONL; "
            "or say what is asked with --endpoint."
        )
    return url
