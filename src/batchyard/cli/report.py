"""Floor 9. What a run tells: words for people, JSON events for programs, exit codes for both."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from batchyard.cli.progress import ProgressView, Snapshot, progress_view
from batchyard.engines.protocol import Engine
from batchyard.errors import BatchyardError, InvalidInput
from batchyard.events import Event, EventBus
from batchyard.service.join import Joined
from batchyard.service.lifecycle import Status
from batchyard.service.work_plan import Stop
from batchyard.stores.protocol import BatchRecord, Counts

#: How many errors of an input are shown; the rest is counted.
_SHOWN_ERRORS = 20


class ExitCode(IntEnum):
    """How a run ended."""

    SUCCEEDED = 0
    SOME_FAILED = 1
    USAGE = 2
    INTERRUPTED = 3


class Report:
    """Tells a run as it happens. With *json_events*, stdout carries JSON lines and nothing else."""

    def __init__(self, *, json_events: bool, to_stderr: bool = False) -> None:
        self.json_events = json_events
        #: Set once the user has asked to stop.
        self.interrupting = False
        self.console = Console(stderr=json_events or to_stderr, highlight=False, soft_wrap=True)
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._view: ProgressView | None = None
        self._started_at = time.monotonic()
        self._done_before = 0

    # --- while it runs --------------------------------------------------------------------------

    def listen(self, events: EventBus) -> None:
        """Tell what engines and models do: downloads, licences, restarts."""
        events.subscribe(self._on_event)

    def created(self, batch: BatchRecord) -> None:
        """The input was accepted."""
        self._emit("run.created", batch=batch.id, total=batch.total, input=batch.input_path)
        self._row("Input", f"{_source_of(batch)} · {_count(batch.total, 'request')}")

    def resumed(self, batch: BatchRecord, done: int) -> None:
        """An earlier run goes on; *done* of its requests are finished."""
        self._done_before = done
        self._emit("run.resumed", batch=batch.id, total=batch.total, done=done)
        self._row("Input", f"{_source_of(batch)} · {_count(batch.total, 'request')}")
        self._row("Resuming", f"{done:,} of {batch.total:,} were finished before; they are kept.")

    def started(self, engine: Engine, concurrency: int) -> None:
        """The engine is ready."""
        self._emit("engine.ready", engine=engine.name, model=engine.model, concurrency=concurrency)
        model = f" · {engine.model}" if engine.model else ""
        self._row(
            "Engine", f"{engine.name}{model} · {_count(concurrency, 'dispatch', 'dispatches')} in flight"
        )

    def progress_start(self, snapshot: Snapshot) -> None:
        """Work begins."""
        self._started_at = time.monotonic()
        self._done_before = max(self._done_before, snapshot.done)
        self._view = progress_view(json_events=self.json_events, console=self.console)
        self._view.start(snapshot)

    def progress(self, snapshot: Snapshot) -> None:
        """Work goes on."""
        if self._view is not None:
            self._view.update(snapshot)

    def progress_end(self, snapshot: Snapshot) -> None:
        """Work has ended, for whatever reason."""
        if self._view is not None:
            self._view.finish(snapshot)
            self._view = None

    def damaged(self, requests: int) -> None:
        """Committed results were found damaged on the disk."""
        self._emit("run.damaged", requests=requests)
        self._row("Damaged", f"{_count(requests, 'result')} cannot be read back and will be run again.")

    # --- how it ended ---------------------------------------------------------------------------

    def finished(self, joined: Joined, batch: BatchRecord, counts: Counts) -> int:
        """Every request has a result."""
        elapsed_s = time.monotonic() - self._started_at
        here = counts.succeeded + counts.failed - self._done_before
        tokens = counts.usage.input_tokens + counts.usage.output_tokens
        self._emit(
            "run.finished",
            batch=batch.id,
            succeeded=counts.succeeded,
            failed=counts.failed,
            elapsed_s=round(elapsed_s, 3),
            input_tokens=counts.usage.input_tokens,
            output_tokens=counts.usage.output_tokens,
            output=_path(joined.output),
            errors=_path(joined.errors),
        )
        speed = f" · {here / elapsed_s:,.1f} requests/s" if elapsed_s > 0 and here else ""
        total_tokens = f" · {tokens:,} tokens" if tokens else ""
        self._row(
            "Done",
            f"{counts.succeeded:,} of {batch.total:,} succeeded in {elapsed_s:,.1f} s{speed}{total_tokens}",
        )
        if joined.output:
            self._row("Results", str(joined.output))
        if joined.errors:
            self._row(
                "Failed",
                f"{_count(counts.failed, 'request')}, each with its reason in {joined.errors}",
                "red",
            )
        return ExitCode.SOME_FAILED if counts.failed else ExitCode.SUCCEEDED

    def ended_before(self, batch: BatchRecord, counts: Counts) -> int:
        """The same run has ended already."""
        self._emit("run.ended_before", batch=batch.id, succeeded=counts.succeeded, failed=counts.failed)
        outcome = f"{counts.succeeded:,} of {batch.total:,} succeeded"
        if counts.failed:
            outcome += f", {counts.failed:,} failed ({batch.error_path})"
        self._row("Done", f"This run has ended already: {outcome}.")
        if batch.output_path:
            missing = "" if Path(batch.output_path).exists() else " (it has been moved or removed since)"
            self._row("Results", f"{batch.output_path}{missing}")
        self._row("Again", f"To run everything again: {_same_command('--restart')}")
        return ExitCode.SOME_FAILED if counts.failed else ExitCode.SUCCEEDED

    def stopped(self, stop: Stop, batch: BatchRecord, counts: Counts, kept: Joined | None) -> int:
        """The run stopped before every request had a result; what is finished is kept."""
        done = counts.succeeded + counts.failed
        self._emit(
            "run.stopped",
            batch=batch.id,
            reason=stop.reason,
            message=stop.message,
            succeeded=counts.succeeded,
            failed=counts.failed,
            total=batch.total,
            partial=_path(kept.output) if kept else None,
            partial_errors=_path(kept.errors) if kept else None,
        )
        self._row("Stopped", stop.message, "yellow")
        self._row("Kept", f"{done:,} of {batch.total:,} are finished, {counts.failed:,} of them failed.")
        if kept and kept.output:
            self._row("So far", str(kept.output))
        if kept and kept.errors:
            self._row("Failed", str(kept.errors))
        if Status(batch.status) is Status.PAUSED:
            self._row("Go on", f"To run the rest all the same: {_same_command(without='--fail-over')}")
            self._row("Again", f"After mending the requests: {_same_command('--restart')}")
            return ExitCode.SOME_FAILED
        self._row("Resume", f"The same command goes on from here: {_same_command()}")
        return ExitCode.INTERRUPTED

    def refused(self, error: InvalidInput) -> int:
        """The input was refused; nothing ran."""
        for one in error.errors:
            fields = {"code": one.code, "line": one.line, "param": one.param, "message": one.message}
            self._emit("input.error", **fields)
        self._emit("run.refused", errors=error.total)
        for one in error.errors[:_SHOWN_ERRORS]:
            self._errors.print(f"[red]{escape(str(one))}[/]")
        hidden = error.total - min(len(error.errors), _SHOWN_ERRORS)
        if hidden > 0:
            self._errors.print(f"… and {_count(hidden, 'more error')}.")
        self._errors.print(f"The input was refused: {_count(error.total, 'error')}. Nothing was run.")
        return ExitCode.USAGE

    def error(self, error: BatchyardError, code: ExitCode) -> int:
        """The run could not go on."""
        self._emit("run.error", kind=type(error).__name__, message=str(error), exit_code=int(code))
        self._errors.print(f"[red]Error[/]      {escape(str(error))}")
        return code

    def say(self, label: str, text: str) -> None:
        """One labelled line for people."""
        self._row(label, text)

    def event(self, name: str, /, **fields: Any) -> None:
        """One event for programs."""
        self._emit(name, **fields)

    def _row(self, label: str, text: str, colour: str = "cyan") -> None:
        self.console.print(f"[{colour}]{label:<11}[/]{escape(text)}")

    def _emit(self, event: str, /, **fields: Any) -> None:
        if self.json_events:
            sys.stdout.write(json.dumps({"event": event, "at": round(time.time(), 3), **fields}) + "\n")
            sys.stdout.flush()

    def _on_event(self, event: Event) -> None:
        words = _ENGINE_EVENTS.get(event.name)
        if words is not None:
            self._emit(event.name, **event.fields)
            self._row(words[0], words[1](event.fields))


_ENGINE_EVENTS: dict[str, tuple[str, Any]] = {
    "model.fetching": (
        "Model",
        lambda f: f"Fetching {f['name']} (licence: {f['licence']}) …",
    ),
    "model.ready": ("Model", lambda f: f"{f['name']} is ready at {f['path']}"),
    "engine.restarted": ("Engine", lambda f: f["message"]),
}


def _source_of(batch: BatchRecord) -> str:
    source: Mapping[str, Any] | None = batch.settings.get("source")
    return source["path"] if source else batch.input_path


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _same_command(*more: str, without: str | None = None) -> str:
    words: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word == without:
            next(given, None)
        elif word not in more and not (without and word.startswith(f"{without}=")):
            words.append(word)
    # Behind the command's name: behind a `--` an option would be taken for a file.
    return shlex.join(["batchyard", *words[:1], *more, *words[1:]])
