"""Floor 9. Following a Batch on a server: its progress and its results, through restarts of the server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from batchyard.cli.progress import Snapshot, progress_view
from batchyard.cli.remote import Remote, Unreachable
from batchyard.cli.remote_words import ENDED, show, status_lines
from batchyard.cli.report import ExitCode
from batchyard.errors import UsageError

_LOOK_S = 0.5
#: How long a server that has gone away is waited for.
_PATIENCE_S = 300.0


async def watch(remote: Remote, batch_id: str, *, json_output: bool) -> int:
    """Show how a Batch comes on until it has ended; the exit code."""
    console = Console(stderr=json_output, highlight=False, soft_wrap=True)
    view = progress_view(json_events=json_output, console=console)
    snapshot: Snapshot | None = None
    started_at = time.monotonic()

    def lost() -> None:
        if snapshot is not None:
            view.update(_aged(snapshot, "The server does not answer; trying again."))

    batch = await remote.call("GET", f"/batches/{batch_id}")
    try:
        while snapshot is not None or batch["status"] not in ENDED:
            found = _snapshot(batch, started_at, snapshot)
            if snapshot is None:
                view.start(found)
            snapshot = found
            view.update(snapshot)
            if batch["status"] in ENDED:
                break
            await asyncio.sleep(_LOOK_S)
            batch = await _patient(remote, f"/batches/{batch_id}", lost)
    finally:
        if snapshot is not None:
            view.finish(snapshot)
    failures = await _patient(remote, f"/batches/{batch_id}/errors", lambda: None)
    show(batch | {"failures": failures["data"]}, json_output, status_lines)
    counts = batch["request_counts"]
    whole = batch["status"] == "completed" and counts["completed"] == counts["total"]
    return ExitCode.SUCCEEDED if whole else ExitCode.SOME_FAILED


async def _patient(remote: Remote, path: str, lost: Callable[[], None]) -> dict[str, Any]:
    """What the server says at *path*; a server that has gone away is waited for, and *lost* hears of it.

    Raises:
        Unreachable: it stayed away for five minutes.
        Refused: it answered with an error.
    """
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await remote.call("GET", path)
        except Unreachable:
            if time.monotonic() > give_up_at:
                raise
            lost()
            await asyncio.sleep(_LOOK_S)


def _snapshot(batch: dict[str, Any], started_at: float, first: Snapshot | None) -> Snapshot:
    counts, usage = batch["request_counts"], batch["usage"]
    now = time.monotonic()
    done = counts["completed"] + counts["failed"] + counts["never_ran"]
    left_s = (batch["expires_at"] or time.time()) - time.time()
    note = batch["waiting_for"] or (
        None if batch["status"] == "in_progress" else f"The batch is {batch['status']}."
    )
    kinds = {"failed": counts["failed"], "never ran": counts["never_ran"]}
    return Snapshot(
        total=counts["total"],
        done=done,
        failed_by_kind={kind: count for kind, count in kinds.items() if count},
        running=0,
        waiting_retry=0,
        input_tokens=usage["input_tokens"],
        output_tokens=usage["output_tokens"],
        started_at=started_at,
        now=now,
        note=note,
        deadline_at=now + left_s,
        done_before=done if first is None else first.done_before,
    )


def _aged(snapshot: Snapshot, note: str) -> Snapshot:
    return dataclasses.replace(snapshot, now=time.monotonic(), note=note)


async def what_is_there(
    remote: Remote, batch_id: str, write: Callable[[str], None], flush: Callable[[], None]
) -> None:
    """Write every result that there is by now."""
    after, more = "", True
    while more:
        params = {"after": after, "limit": "2000"}
        page = await remote.call("GET", f"/batches/{batch_id}/results", params=params)
        for line in page["data"]:
            write(json.dumps(line))
        flush()
        after, more = page["next_after"], page["has_more"]


async def follow(
    remote: Remote, batch_id: str, write: Callable[[str], None], flush: Callable[[], None]
) -> None:
    """Write results as they come until the Batch has ended; a stream that breaks is taken up."""
    last_id = ""
    lost_at: float | None = None
    # Ids of lines that were written since the server last said up to where it had come.
    since: set[str] = set()
    began = False
    while True:
        try:
            path = f"/batches/{batch_id}/results?stream=true"
            async for name, data, event_id in remote.events(path, last_id):
                began, lost_at = True, None
                if name == "result":
                    line_id = json.loads(data)["id"]
                    if line_id not in since:
                        since.add(line_id)
                        write(data)
                    if event_id != last_id:
                        last_id = event_id
                        since.clear()
                elif name == "error":
                    raise UsageError(json.loads(data)["error"]["message"])
                else:
                    flush()
                if name == "end":
                    return
        except Unreachable:
            if not began or (lost_at is not None and time.monotonic() - lost_at > _PATIENCE_S):
                raise
        lost_at = lost_at or time.monotonic()
        await asyncio.sleep(_LOOK_S)
