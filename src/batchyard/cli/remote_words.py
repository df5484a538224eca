"""Floor 9. What a server says of Batches, in words for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from batchyard.service.lifecycle import TERMINAL

ENDED = frozenset(one.value for one in TERMINAL)


def show(found: Any, as_json: bool, lines: Callable[[Any], list[str]]) -> None:  # noqa: FBT001
    """Print *found* as JSON, or as *lines*."""
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for line in lines(found):
        console.print(line)


def row(batch: dict[str, Any]) -> str:
    """A Batch in a list."""
    counts = batch["request_counts"]
    words = f"{counts['completed']:,} of {counts['total']:,}"
    if counts["failed"]:
        words += f", {counts['failed']:,} failed"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
    return f"{batch['id']}  {batch['status']:<11}  {words:<24}  {batch['model'] or '-'}  {made}"


def status_lines(batch: dict[str, Any]) -> list[str]:
    """Where a Batch stands."""
    counts, usage = batch["request_counts"], batch["usage"]
    lines = [f"{batch['id']}  {batch['status']}"]
    total = counts["total"]
    if total:
        words = f"{counts['completed']:,} of {total:,} succeeded"
        words += f", {counts['failed']:,} failed" if counts["failed"] else ""
        words += f", {counts['never_ran']:,} never ran" if counts["never_ran"] else ""
        lines.append(f"  Requests  {words}")
    if usage["total_tokens"]:
        lines.append(f"  Tokens    {usage['input_tokens']:,} in, {usage['output_tokens']:,} out")
    if batch["waiting_for"]:
        lines.append(f"  Waits     {batch['waiting_for']}")
    if batch["status"] not in ENDED and batch["expires_at"]:
        lines.append(
            f"  Window    ends {time.strftime('%Y-%m-%d %H:%M', time.localtime(batch['expires_at']))}"
        )
    lines += [
        f"  Line {one['line']}  {one['message']}" if one["line"] else f"  Refused   {one['message']}"
        for one in (batch["errors"] or {"data": []})["data"]
    ]
    lines += [
        f"  Failed    {one['count']:,} × {one['code']}: {one['message']} (such as {one['example_custom_id']})"
        for one in batch.get("failures", ())
    ]
    if batch["saved"]:
        saved = batch["saved"]
        words = f"{saved['requests']:,} requests"
        words += f", about {saved['tokens']:,} tokens" if saved["tokens"] is not None else ""
        words += f" and {saved['seconds']:,.0f} s" if saved["seconds"] is not None else ""
        lines.append(f"  Saved     {words}")
    if batch["output_file_id"] or batch["error_file_id"]:
        lines.append(f"  Results   batchyard results {batch['id']} -o results.jsonl")
    return lines


def estimate_lines(found: dict[str, Any]) -> list[str]:
    """What a Batch would be."""
    if not found["valid"]:
        rows = found["errors"]["data"]
        return [f"  Line {one['line']}  {one['message']}" if one["line"] else one["message"] for one in rows]
    lines = [f"  Requests  {found['requests']:,}, about {found['input_tokens']:,} prompt tokens"]
    for one in found["models"]:
        rate = one["requests_per_second"]
        speed = "no speed measured yet" if rate is None else f"{rate:,.1f} requests/s measured"
        lines.append(f"  Model     {one['model']}: " + (speed if one["served"] else "not served here"))
    if found["seconds"] is not None:
        fits = "within its window"
        if not found["fits_window"]:
            fits = (
                f"not within its window; {found['earliest_window_seconds'] // 60 + 1:,} minutes could be kept"
            )
        lines.append(f"  Time      about {found['seconds']:,.0f} s, {fits}")
    return lines
