"""What a run's progress says, at every width, and when the plain view says it."""

import io
import json

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from batchyard.cli.progress import (
    JsonView,
    Meters,
    PlainView,
    Rates,
    Snapshot,
    duration,
    progress_view,
    render_line,
    render_lines,
)


def snapshot(done=0, now=0.0, **changes):
    given_ = {
        "total": 1000,
        "done": done,
        "failed_by_kind": {},
        "running": 8,
        "waiting_retry": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "started_at": 0.0,
        "now": now,
    }
    return Snapshot(**{**given_, **changes})


def test_a_line_tells_everything_that_matters():
    line = render_line(
        snapshot(
            500,
            10.0,
            failed_by_kind={"HTTP 400": 3, "timeout": 1},
            waiting_retry=2,
            deadline_at=1000.0,
        ),
        Rates(50.0, 1234.0),
    )
    assert line == (
        "500/1,000 ·  50% · 50.0 requests/s · 1,234 tokens/s · 4 failed (HTTP 400 ×3, timeout ×1) · ETA 10 s · "
        "deadline in 16 m 30 s (early) · 2 to retry · 8 running"
    )


@given(
    st.integers(10, 200),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.dictionaries(st.text(max_size=9), st.integers(0, 10**6), max_size=5),
)
def test_nothing_is_left_out_and_no_line_is_too_wide(width, total, done, failed):
    one = snapshot(min(done, total), 5.0, total=total, failed_by_kind=failed, deadline_at=7.0)
    lines = render_lines(one, Rates(3.0, 4.0), width)
    assert all(len(line) <= width for line in lines)
    if width == 200:
        assert " · ".join(lines) == render_line(one, Rates(3.0, 4.0))


def test_a_run_that_waits_promises_no_time():
    line = render_line(snapshot(999, 10.0, note="The upstream limits the rate."), Rates(50.0, 0.0))
    assert "ETA unknown" in line


def test_an_empty_run_divides_by_nothing():
    assert render_line(snapshot(0, total=0), Rates()).startswith("0/0 · 100%")


def test_rates_are_of_the_last_seconds():
    meters = Meters()
    for second in range(30):
        rates = meters.add(
            snapshot(second * 100 if second < 15 else 1400 + second, float(second), total=10**6)
        )
    assert rates.requests_per_s < 20


def test_durations_in_words():
    assert [duration(s) for s in (4, 200, 7500, 270_000)] == ["4 s", "3 m 20 s", "2 h 05 m", "3 d 03 h"]


def test_the_plain_view_speaks_seldom_and_tells_a_note_once():
    out = io.StringIO()
    view = PlainView(Console(file=out, width=200))
    view.start(snapshot())
    for tick in range(1, 100):
        view.update(snapshot(tick, tick / 10, note="Upstream gone." if 30 < tick < 60 else None))
    view.finish(snapshot(100, 10.0))
    said = out.getvalue().splitlines()
    assert said.count("Upstream gone.") == 1
    assert len(said) < 8
    assert said[-1].startswith("100/1,000")


def test_json_events_are_one_a_second_at_most(capsys):
    view = progress_view(json_events=True, console=Console())
    assert isinstance(view, JsonView)
    view.start(snapshot())
    for tick in range(1, 31):
        view.update(snapshot(tick, tick / 10))
    view.finish(snapshot(31, 3.1))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in events] == ["run.progress"] * 5
    assert events[-1]["done"] == 31
