"""Registering 1,000,000 requests: lines a second and memory, beside floors and the standard parser.

    python benchmarks/bench_register.py [--lines 1000000] [--repeat 3] [--json]

Every contender runs in a process of its own over the same file, in turn; the best of the repeats counts.
Memory is the growth of the peak resident set over what the imports took.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TEXT = "The quick brown fox jumps over the lazy dog while the rain in Spain stays mainly in the plain. "


def generate(path: Path, lines: int, *, text_bytes: int = 290) -> None:
    """Chat requests of about 460 bytes with the default of *text_bytes*."""
    text = (TEXT * (text_bytes // len(TEXT) + 1))[:text_bytes]
    with path.open("w") as file:
        for number in range(lines):
            file.write(
                f'{{"custom_id": "request-{number}", "method": "POST", "url": "/v1/chat/completions", '
                '"body": {"model": "small-model", "messages": [{"role": "user", "content": '
                f'"{text}"}}], "max_tokens": 64}}}}\n'
            )


def blocks_alone(path: Path) -> int:
    """The floor: read the same blocks and split them, look at nothing."""
    return sum(1 for _ in _lines(path))


def decode_alone(path: Path) -> int:
    """One typed decode a line: no hash, no duplicates, no chunks."""
    from batchyard.service.intake.scan import decode_line

    return sum(1 for raw in _lines(path) if decode_line(raw).custom_id)


def json_alone(path: Path) -> int:
    """`json.loads` and a look at the members that must be there; what a plain script does."""
    seen = set()
    for raw in _lines(path):
        found = json.loads(raw)
        body = found["body"]
        if found["method"] != "POST" or not body["model"] or "messages" not in body or body.get("stream"):
            raise SystemExit("a line is wrong")
        seen.add(found["custom_id"])
    return len(seen)


def register_all(path: Path) -> int:
    """The real thing: every check, duplicates, chunks, SHA-256."""
    from batchyard.service.intake.registration import IntakeRules, register
    from batchyard.types import Endpoint

    return register(path, IntakeRules(frozenset(Endpoint))).total


def read_again(path: Path) -> int:
    """What a worker does while it runs: one `pread` and one parse for each chunk."""
    from batchyard.service.intake.chunk import read_requests
    from batchyard.service.intake.registration import ChunkSpan

    total = 0
    with path.open("rb") as file:
        for number, (offset, length, count) in enumerate(_spans(path)):
            span = ChunkSpan(number, offset, length, total, total + 1, count)
            total += len(read_requests(os.pread(file.fileno(), length, offset), span))
    return total


def _spans(path: Path) -> list[tuple[int, int, int]]:
    """Chunks of 500 lines, found without registering; `run_one` calls it before the clock starts."""
    if not _SPANS:
        offset = length = count = 0
        for raw in _lines(path):
            length, count = length + len(raw) + 1, count + 1
            if count == 500:
                _SPANS.append((offset, length, count))
                offset, length, count = offset + length, 0, 0
        if count:
            _SPANS.append((offset, length, count))
    return _SPANS


_SPANS: list[tuple[int, int, int]] = []


def _lines(path: Path) -> Iterator[bytes]:
    rest = b""
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            yield from lines


CONTENDERS: dict[str, Callable[[Path], int]] = {
    "blocks": blocks_alone,
    "decode": decode_alone,
    "json.loads": json_alone,
    "register": register_all,
    "read again": read_again,
}


def measure(name: str, path: Path) -> dict[str, float]:
    """Run one contender in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--only", name, "--file", str(path)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return json.loads(done.stdout)


def run_one(name: str, path: Path) -> None:
    import batchyard.service.intake.registration  # noqa: F401 - imports are not what is measured

    contender = CONTENDERS[name]
    if contender is read_again:
        _spans(path)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, started_cpu = time.perf_counter(), time.process_time()
    lines = contender(path)
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    print(json.dumps({"lines": lines, "seconds": seconds, "cpu_s": cpu, "grown_mb": grown_kb / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--text-bytes", type=int, default=290)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run_one(options.only, options.file)
        return
    with tempfile.TemporaryDirectory(prefix="batchyard-bench-") as folder:
        path = Path(folder) / "requests.jsonl"
        generate(path, options.lines, text_bytes=options.text_bytes)
        size_mb = path.stat().st_size / 1e6
        found: dict[str, dict[str, float]] = {}
        for _ in range(options.repeat):
            for name in CONTENDERS:
                run = measure(name, path)
                if name not in found or run["seconds"] < found[name]["seconds"]:
                    found[name] = run
    for run in found.values():
        run["lines_per_s"] = run["lines"] / run["seconds"]
        run["bytes_per_request"] = run["grown_mb"] * 2**20 / options.lines
        run["ratio_to_json"] = found["json.loads"]["seconds"] / run["seconds"]
    if options.json:
        print(json.dumps({"lines": options.lines, "size_mb": size_mb, "runs": found}))
        return
    print(f"{options.lines:,} lines, {size_mb:,.0f} MB, best of {options.repeat}\n")
    print(f"{'':12}{'lines/s':>12}{'× json.loads':>14}{'CPU s':>8}{'memory':>10}{'a request':>12}")
    for name, run in found.items():
        print(
            f"{name:12}{run['lines_per_s']:>12,.0f}{run['ratio_to_json']:>14.2f}{run['cpu_s']:>8.2f}"
            f"{run['grown_mb']:>7.1f} MB{run['bytes_per_request']:>10.0f} B"
        )


if __name__ == "__main__":
    main()
