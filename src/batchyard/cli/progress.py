"""Floor 9. Live progress of a run: one block on a terminal, plain lines elsewhere, JSON events for programs.

What is drawn is decided by `render_lines`, a pure function; the views only decide when.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from batchyard.planning.estimate import RateMeter, Verdict, eta_s, verdict

_PLAIN_EVERY_S = 10.0
_PLAIN_STEP = 0.05
_JSON_EVERY_S = 1.0
_COLOURS = {Verdict.EARLY: "green", Verdict.TIGHT: "yellow", Verdict.LATE: "red"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one instant. Times are seconds of one monotonic clock."""

    total: int
    done: int
    failed_by_kind: dict[str, int]
    running: int
    waiting_retry: int
    input_tokens: int
    output_tokens: int
    started_at: float
    now: float
    note: str | None = None
    deadline_at: float | None = None
    #: What earlier runs had finished; it counts as done, not as speed.
    done_before: int = 0

    @property
    def failed(self) -> int:
        """Requests that failed, of whatever kind."""
        return sum(self.failed_by_kind.values())


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds over the last seconds."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0


class Meters:
    """Turns snapshots into rates."""

    def __init__(self) -> None:
        self._requests = RateMeter()
        self._tokens = RateMeter()

    def add(self, snapshot: Snapshot) -> Rates:
        """The rates after one more snapshot."""
        self._requests.add(snapshot.now, snapshot.done)
        self._tokens.add(snapshot.now, snapshot.input_tokens + snapshot.output_tokens)
        return Rates(self._requests.per_s, self._tokens.per_s)


def render_lines(snapshot: Snapshot, rates: Rates, width: int) -> list[str]:
    """A run in as many lines of at most *width* characters as it takes; nothing is left out."""
    lines = [""]
    for part in _parts(snapshot, rates):
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return [line if len(line) <= width else line[: max(width - 1, 0)] + "…" for line in lines]


def render_line(snapshot: Snapshot, rates: Rates) -> str:
    """A run in one line, for logs."""
    return " · ".join(_parts(snapshot, rates))


def _parts(snapshot: Snapshot, rates: Rates) -> list[str]:
    share = snapshot.done / snapshot.total if snapshot.total else 1.0
    parts = [f"{snapshot.done:,}/{snapshot.total:,}", f"{share:4.0%}"]
    parts += _speed(rates)
    failed = _failures(snapshot)
    if failed:
        parts.append(failed)
    parts += _time_left(snapshot, rates)
    if snapshot.waiting_retry:
        parts.append(f"{snapshot.waiting_retry:,} to retry")
    parts.append(f"{snapshot.running:,} running")
    return parts


def _speed(rates: Rates) -> list[str]:
    parts = [f"{_short(rates.requests_per_s)} requests/s"]
    if rates.tokens_per_s:
        parts.append(f"{_short(rates.tokens_per_s)} tokens/s")
    return parts


def _failures(snapshot: Snapshot) -> str:
    if not snapshot.failed:
        return ""
    kinds = sorted(snapshot.failed_by_kind.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{kind} ×{count:,}" for kind, count in kinds[:3])
    return f"{snapshot.failed:,} failed ({shown}{', …' if len(kinds) > 3 else ''})"


def _time_left(snapshot: Snapshot, rates: Rates) -> list[str]:
    remaining = snapshot.total - snapshot.done
    if not remaining:
        return []
    left_s = eta_s(remaining, rates.requests_per_s)
    if snapshot.note:
        # Nothing moves: what the last seconds' rate says of the time left is not so.
        left_s = None
    parts = [f"ETA {duration(left_s)}"] if left_s is not None else ["ETA unknown"]
    if snapshot.deadline_at is not None:
        until_s = snapshot.deadline_at - snapshot.now
        found = verdict(left_s, until_s)
        parts.append(f"deadline in {duration(max(until_s, 0))}{f' ({found})' if found else ''}")
    return parts


def duration(seconds: float) -> str:
    """`4 s`, `3 m 20 s`, `2 h 05 m` or `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:,.1f}"


class ProgressView(Protocol):
    """Draws a run; driven from outside, several times a second."""

    def start(self, snapshot: Snapshot) -> None:
        """Work begins."""
        ...

    def update(self, snapshot: Snapshot) -> None:
        """Work goes on."""
        ...

    def finish(self, snapshot: Snapshot) -> None:
        """Work has ended, for whatever reason."""
        ...


def progress_view(*, json_events: bool, console: Console) -> ProgressView:
    """The view that fits who is looking."""
    if json_events:
        return JsonView()
    return LiveView(console) if console.is_terminal else PlainView(console)


class LiveView:
    """A bar and a line that renew themselves on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._meters = Meters()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def start(self, snapshot: Snapshot) -> None:
        self._live.start()
        self.update(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        self._live.update(self._draw(snapshot), refresh=True)

    def finish(self, snapshot: Snapshot) -> None:
        self.update(snapshot)
        self._live.stop()

    def _draw(self, snapshot: Snapshot) -> Text:
        width = self._console.width
        bar_width = min(max(width - 2, 4), 60)
        share = snapshot.done / snapshot.total if snapshot.total else 1.0
        failed_share = snapshot.failed / snapshot.total if snapshot.total else 0.0
        filled = int(share * bar_width)
        red = min(filled, round(failed_share * bar_width) or int(snapshot.failed > 0))
        rates = self._meters.add(snapshot)
        text = Text.assemble(
            ("━" * (filled - red), "green"), ("━" * red, "red"), ("─" * (bar_width - filled), "dim")
        )
        text.append("".join("\n" + line for line in render_lines(snapshot, rates, width)))
        left_s = eta_s(snapshot.total - snapshot.done, rates.requests_per_s)
        if snapshot.deadline_at is not None:
            found = verdict(left_s, snapshot.deadline_at - snapshot.now)
            if found is not None:
                text.highlight_words([f"({found})"], _COLOURS[found])
        if snapshot.note:
            text.append(f"\n{snapshot.note}", "yellow")
        return text


class PlainView:
    """Lines for logs: at the start, every twentieth or every ten seconds, at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._meters = Meters()
        self._last_at = 0.0
        self._last_done = 0
        self._last_note: str | None = None
        self._printed = False

    def start(self, snapshot: Snapshot) -> None:
        self._meters.add(snapshot)
        self._last_at, self._last_done = snapshot.now, snapshot.done

    def update(self, snapshot: Snapshot) -> None:
        rates = self._meters.add(snapshot)
        if snapshot.note and snapshot.note != self._last_note:
            self._console.print(snapshot.note, markup=False)
        self._last_note = snapshot.note
        waited_s = snapshot.now - self._last_at
        step = snapshot.done - self._last_done >= max(_PLAIN_STEP * snapshot.total, 1)
        if waited_s >= _PLAIN_EVERY_S or (step and waited_s >= 1.0):
            self._print(snapshot, rates)

    def finish(self, snapshot: Snapshot) -> None:
        rates = self._meters.add(snapshot)
        if not self._printed or snapshot.done != self._last_done:
            self._print(snapshot, rates)

    def _print(self, snapshot: Snapshot, rates: Rates) -> None:
        self._printed = True
        self._last_at, self._last_done = snapshot.now, snapshot.done
        self._console.print(render_line(snapshot, rates), markup=False)


class JsonView:
    """`run.progress` events on standard output, at most one a second."""

    def __init__(self) -> None:
        self._meters = Meters()
        self._last_at = float("-inf")

    def start(self, snapshot: Snapshot) -> None:
        self.update(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        rates = self._meters.add(snapshot)
        if snapshot.now - self._last_at >= _JSON_EVERY_S:
            self._write(snapshot, rates)

    def finish(self, snapshot: Snapshot) -> None:
        self._write(snapshot, self._meters.add(snapshot))

    def _write(self, snapshot: Snapshot, rates: Rates) -> None:
        self._last_at = snapshot.now
        event = {
            "event": "run.progress",
            "at": round(time.time(), 3),
            "total": snapshot.total,
            "done": snapshot.done,
            "failed": snapshot.failed,
            "failed_by_kind": snapshot.failed_by_kind,
            "running": snapshot.running,
            "waiting_retry": snapshot.waiting_retry,
            "input_tokens": snapshot.input_tokens,
            "output_tokens": snapshot.output_tokens,
            "requests_per_s": round(rates.requests_per_s, 3),
            "tokens_per_s": round(rates.tokens_per_s, 3),
            "eta_s": eta_s(snapshot.total - snapshot.done, rates.requests_per_s),
            "note": snapshot.note,
        }
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
