"""A million requests on `echo`: registering, answering, joining, and what memory it takes.

    python benchmarks/bench_million.py [--requests 1000000]

Runs the real command in a child process, checks that every custom_id stands once and in order, and prints
the peak resident memory that the kernel saw (VmHWM of the process itself).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

CHILD = """
import re, sys
sys.argv = ["batchyard", *sys.argv[1:]]
from batchyard.__main__ import main
try:
    main()
finally:
    peak = re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read())
    sys.stderr.write(f"peak {int(peak[1]) // 1024}\\n")
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        text = "lorem ipsum dolor sit amet " * 12
        with source.open("w") as file:
            for i in range(count):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{i} {text}"}]}
                line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        megabytes = source.stat().st_size / 1e6
        command = [
            sys.executable,
            "-c",
            CHILD,
            "run",
            str(source),
            "-o",
            str(output),
            "--engine",
            "echo",
            "--json",
        ]
        begun = perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        elapsed_s = perf_counter() - begun
        events = [json.loads(line) for line in done.stdout.splitlines()]
        finished = events[-1]
        if done.returncode or finished["event"] != "run.finished":
            raise SystemExit(f"The run failed: {done.stderr}")
        with output.open() as lines:
            for i, line in enumerate(lines):
                if json.loads(line)["custom_id"] != f"r{i}":
                    raise SystemExit(f"Line {i + 1} is not that of request r{i}.")
        if i + 1 != count:
            raise SystemExit(f"{i + 1} lines for {count} requests.")
        peak_mb = int(done.stderr.split("peak ")[-1])
    worked_s = finished["elapsed_s"]
    print(f"{count:,} requests, {megabytes:,.0f} MB of input, every custom_id once and in order")
    print(f"  in all                     {elapsed_s:8.1f} s (start-up and join included)")
    print(f"  answered                   {count / worked_s:8,.0f} requests/s, durable")
    print(f"  peak memory                {peak_mb:8,} MB (limit 250)")


if __name__ == "__main__":
    main()
