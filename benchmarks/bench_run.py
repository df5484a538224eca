"""`batchyard run` beside a bare client loop and, where it is installed, curator; one upstream, one run.

    python benchmarks/bench_run.py [--requests 20000] [--rounds 3] [--curator-python PATH]

The upstream is `batchyard.testing.upstream` with no latency, in a process of its own. Rounds alternate and
the median of each is shown. Own CPU is that of the client process alone, start-up excluded by running an
input of one request and subtracting it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

CONCURRENCY = 64
HERE = Path(__file__).resolve().parent

BARE = """
import asyncio, json, sys
import aiohttp
source, target, url, concurrency, loop = sys.argv[1:6]
async def main():
    with open(source, "rb") as lines, open(target, "wb") as out:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            async def lane():
                for line in lines:
                    request = json.loads(line)
                    async with session.post(url + request["url"][3:], json=request["body"]) as reply:
                        body = await reply.json()
                    response = {"status_code": reply.status, "body": body}
                    result = {"custom_id": request["custom_id"], "response": response}
                    out.write(json.dumps(result).encode() + b"\\n")
            await asyncio.gather(*(lane() for _ in range(int(concurrency))))
if loop == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""

CURATOR = """
import os, sys
os.environ.update(OPENAI_API_KEY="none", CURATOR_DISABLE_CACHE="true", TELEMETRY_ENABLED="false",
                  CURATOR_VIEWER="false", CURATOR_DISABLE_RICH_DISPLAY="true")
import tiktoken
class Words:  # tiktoken would download its tables; counting words is cheaper, which favours curator
    def encode(self, text, **_):
        return text.split()
tiktoken.encoding_for_model = tiktoken.get_encoding = lambda *_: Words()
from bespokelabs import curator
source, target, url, count, cache = sys.argv[1:6]
llm = curator.LLM(model_name="gpt-4o-mini", backend="openai", backend_params={
    "base_url": url, "max_requests_per_minute": 10_000_000, "max_tokens_per_minute": 10_000_000_000,
    "max_concurrent_requests": 64})
llm([f"question {i}" for i in range(int(count))], working_dir=cache)
"""


def measure(command: list[str]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of one child."""
    begun = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    complained = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:6]} failed:\n{complained.decode()[-2000:]}")
    return perf_counter() - begun, usage.ru_utime + usage.ru_stime


def write_requests(path: Path, count: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            body = {"model": "m", "messages": [{"role": "user", "content": f"question {i} " + "word " * 60}]}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


class Contestant:
    """One way to answer the file; start-up is measured apart and taken off."""

    def __init__(self, name: str, command, requests: int) -> None:
        self.name = name
        self._command = command
        self.requests = requests
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.start_wall, self.start_cpu = measure(command(one=True))

    def round(self) -> None:
        wall, cpu = measure(self._command(one=False))
        self.walls.append(max(wall - self.start_wall, 1e-9))
        self.cpus.append(max(cpu - self.start_cpu, 0.0))

    @property
    def per_s(self) -> float:
        return self.requests / median(self.walls)

    def ratio_to(self, other: Contestant) -> float:
        """Times as fast as *other*: the median over rounds, whose runs are neighbours in time."""
        pairs = zip(self.walls, other.walls, strict=True)
        return median(theirs / mine for mine, theirs in pairs) * self.requests / other.requests

    @property
    def cpu_us(self) -> float:
        return median(self.cpus) / self.requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--curator-python", help="the python of an environment with bespokelabs-curator")
    options = parser.parse_args()
    upstream = subprocess.Popen(
        [sys.executable, "-m", "batchyard.testing.upstream", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert upstream.stdout is not None
    url = json.loads(upstream.stdout.readline())["url"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            contestants = [*ours(Path(folder), url, options.requests)]
            if options.curator_python:
                contestants.append(curator(Path(folder), url, options.curator_python, options.requests // 10))
            for _ in range(options.rounds):
                for contestant in contestants:
                    contestant.round()
    finally:
        upstream.kill()
        upstream.wait()
    floor = next(one for one in contestants if one.name.endswith("uvloop"))
    print(
        f"{options.requests:,} requests, {CONCURRENCY} in flight, zero-latency upstream, median of {options.rounds}\n"
    )
    print(f"{'':32}{'requests/s':>12}{'CPU µs/request':>16}{'× bare, uvloop':>16}")
    for one in contestants:
        print(f"{one.name:32}{one.per_s:12,.0f}{one.cpu_us:16,.0f}{one.ratio_to(floor):16.2f}")
    if options.curator_python:
        times = contestants[0].ratio_to(contestants[-1])
        print(f"\nbatchyard run is {times:.1f} times as fast as curator.")


def ours(folder: Path, url: str, requests: int):
    many, single = folder / "many.jsonl", folder / "one.jsonl"
    write_requests(many, requests)
    write_requests(single, 1)
    script = folder / "bare.py"
    script.write_text(BARE)

    def run(*, one: bool) -> list[str]:
        source = single if one else many
        command = [sys.executable, "-m", "batchyard", "run", str(source), "-o", str(folder / "out.jsonl")]
        return [*command, "--base-url", url, "--concurrency", str(CONCURRENCY), "--restart"]

    def bare(loop: str):
        def command(*, one: bool) -> list[str]:
            source = single if one else many
            return [
                sys.executable,
                str(script),
                str(source),
                str(folder / "bare.out"),
                url,
                str(CONCURRENCY),
                loop,
            ]

        return command

    yield Contestant("batchyard run, durable", run, requests)
    yield Contestant("bare aiohttp loop, asyncio", bare("asyncio"), requests)
    yield Contestant("bare aiohttp loop, uvloop", bare("uvloop"), requests)


def curator(folder: Path, url: str, python: str, requests: int) -> Contestant:
    script = folder / "curator_run.py"
    script.write_text(CURATOR)
    runs = iter(range(1000))

    def command(*, one: bool) -> list[str]:
        count = 1 if one else requests
        return [python, str(script), "", "", url, str(count), str(folder / f"cache-{next(runs)}")]

    return Contestant(f"curator ({requests:,} requests)", command, requests)


if __name__ == "__main__":
    main()
