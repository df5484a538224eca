"""Live requests through the server, beside a bare Starlette route that forwards the same.

    python benchmarks/bench_gateway.py [--requests 6000] [--rounds 3] [--litellm-python PATH]

One zero-latency upstream, one client that keeps 64 requests in flight, servers that take turns. The server
asks for keys; the bare route asks for nothing, parses nothing and keeps nothing. CPU is that of the server's
process alone; the peer gets a twentieth of the requests. With 2 cores, client, server and upstream share them: only ratios mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from gateway_peers import Measured, litellm

IN_FLIGHT = 64

BARE = """
import sys
import aiohttp, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
url = sys.argv[1]
async def forward(request):
    if not hasattr(app.state, "session"):
        app.state.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    body = await request.body()
    async with app.state.session.post(url + "/chat/completions", data=body,
                                      headers={"content-type": "application/json"}) as reply:
        return Response(await reply.read(), reply.status, media_type="application/json")
app = Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])
class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print("Listening on http://127.0.0.1:%d/v1" % self.servers[0].sockets[0].getsockname()[1],
              file=sys.stderr, flush=True)
Server(uvicorn.Config(app, port=0, log_level="error", access_log=False)).run()
"""


async def load(url: str, key: str, requests: int) -> tuple[float, list[float]]:
    """Requests a second, and the latency of each in ms."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "question " + "word " * 60}]})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    left = iter(range(requests))
    took: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def lane() -> None:
            for _ in left:
                begun = time.perf_counter()
                async with session.post(f"{url}/chat/completions", data=body, headers=headers) as reply:
                    answer = await reply.read()
                    assert reply.status == 200, answer
                took.append((time.perf_counter() - begun) * 1e3)

        begun = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        return requests / (time.perf_counter() - begun), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litellm-python", help="A Python with litellm[proxy], to run beside.")
    options = parser.parse_args()
    upstream = subprocess.Popen(
        [sys.executable, "-m", "batchyard.testing.upstream"], stdout=subprocess.PIPE, text=True
    )
    assert upstream.stdout is not None
    url = json.loads(upstream.stdout.readline())["url"]
    servers: list[Measured] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            state = str(Path(folder) / "state")
            batchyard = [sys.executable, "-m", "batchyard"]
            made = subprocess.run(
                [*batchyard, "keys", "create", "bench", "--state", state],
                capture_output=True,
                text=True,
                check=True,
            )
            serve = [*batchyard, "serve", "--base-url", url, "--model", "m", "--port", "0", "--state", state]
            serve += ["--concurrency", str(IN_FLIGHT)]
            servers.append(Measured("batchyard serve, keys on", serve, key=made.stdout.strip()))
            servers.append(Measured("bare Starlette route", [sys.executable, "-c", BARE, url]))
            if options.litellm_python:
                servers.append(litellm(options.litellm_python, url, Path(folder)))
            for server in servers:
                uvloop.run(load(server.url, server.key, 200))
            for _ in range(options.rounds):
                for server in servers:
                    before = server.cpu_s()
                    requests = options.requests // (20 if server.name.startswith("LiteLLM") else 1)
                    rate, took = uvloop.run(load(server.url, server.key, requests))
                    took.sort()
                    server.rates.append(rate)
                    server.cpus_us.append((server.cpu_s() - before) / requests * 1e6)
                    server.p50_ms.append(took[len(took) // 2])
                    server.p99_ms.append(took[int(len(took) * 0.99)])
    finally:
        for server in servers:
            server.stop()
        upstream.kill()
        upstream.communicate()
    print(f"{options.requests:,} live requests, {IN_FLIGHT} in flight, median of {options.rounds} rounds\n")
    print(f"{'':28}{'requests/s':>12}{'CPU µs':>10}{'p50 ms':>9}{'p99 ms':>9}{'of the bare route':>20}")
    for server in servers:
        share = server.share_of(servers[1])
        print(
            f"{server.name:28}{median(server.rates):12,.0f}{median(server.cpus_us):10,.0f}"
            f"{median(server.p50_ms):9.1f}{median(server.p99_ms):9.1f}{share:19.0%}"
        )
    if len(servers) > 2:
        print(f"\nbatchyard answers {servers[0].share_of(servers[2]):,.1f} x as many as LiteLLM's proxy")


if __name__ == "__main__":
    main()
