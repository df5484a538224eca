"""A Batch through the server by the OpenAI API: from the upload's first byte to `completed`.

    python benchmarks/bench_batch_api.py [--lines 5000] [--upload-mb 200] [--ogx-python PATH]

The upstream answers at once; the peer gets a tenth of the lines. CPU and memory are those of the server's process alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from bench_gateway import IN_FLIGHT
from gateway_peers import Measured, ogx


def lines(count: int, model: str = "m") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "question " + "word " * 60}]}
    return b"".join(
        json.dumps(
            {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        ).encode()
        + b"\n"
        for n in range(count)
    )


def run_batch(server: Measured, count: int, *, model: str = "m", pause_s: float = 0.05) -> float:
    """Upload, create, poll until it has ended; requests a second."""
    data = lines(count, model)
    with httpx.Client(base_url=server.url, timeout=600) as client:
        before, begun = server.cpu_s(), time.perf_counter()
        upload = [("purpose", (None, "batch")), ("file", ("in.jsonl", data))]
        file = client.post("/files", files=upload).json()
        wanted = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = client.post("/batches", json=wanted).json()
        while batch["status"] != "completed":
            assert batch["status"] not in {"failed", "expired", "cancelled"}, str(batch)[:2_000]
            time.sleep(pause_s)
            batch = client.get(f"/batches/{batch['id']}").json()
        took, cpu = time.perf_counter() - begun, server.cpu_s() - before
    assert batch["request_counts"]["completed"] == count, str(batch)[:2_000]
    print(
        f"{server.name}: {count:,} lines, upload to completed: {took:.2f} s, {count / took:,.0f} requests/s, "
        f"{cpu / count * 1e6:,.0f} µs CPU a request, peak {server.peak_mb():.0f} MB"
    )
    return count / took


def upload_speed(server: Measured, megabytes: int) -> None:
    """Send one large file, by a client that costs next to nothing: the form is made beforehand."""
    block = lines(20_000)
    parts = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n',
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="big.jsonl"\r\n\r\n',
        *([block] * max(1, (megabytes << 20) // len(block))),
        b"\r\n--b--\r\n",
    )
    form = b"".join(parts)
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=600)
    begun = time.perf_counter()
    connection.request("POST", f"{url.path}/files", form, {"content-type": "multipart/form-data; boundary=b"})
    answer = connection.getresponse()
    took = time.perf_counter() - begun
    assert answer.status == 200, answer.read()
    size = len(form) / 1e6
    print(f"Upload of {size:.0f} MB: {size / took:.0f} MB/s, peak {server.peak_mb():.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=5_000)
    parser.add_argument("--upload-mb", type=int, default=200)
    parser.add_argument("--database", help="The URL of a PostgreSQL database, to measure on that too.")
    parser.add_argument("--ogx-python", help="A Python with ogx, to run beside.")
    options = parser.parse_args()
    upstream = subprocess.Popen(
        [sys.executable, "-m", "batchyard.testing.upstream"], stdout=subprocess.PIPE, text=True
    )
    assert upstream.stdout is not None
    url = json.loads(upstream.stdout.readline())["url"]
    servers: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "batchyard", "serve", "--base-url", url, "--model", "m"]
        command += ["--port", "0", "--concurrency", str(IN_FLIGHT)]
        try:
            ours = Measured("batchyard, SQLite", [*command, "--state", f"{folder}/state"])
            servers.append(ours)
            rate = run_batch(ours, options.lines)
            upload_speed(ours, options.upload_mb)
            if options.database:
                more = ["--state", f"{folder}/shared", "--database", options.database]
                servers.append(Measured("batchyard, PostgreSQL", [*command, *more]))
                run_batch(servers[-1], options.lines)
            if options.ogx_python:
                servers.append(ogx(options.ogx_python, url, Path(folder), IN_FLIGHT))
                theirs = run_batch(servers[-1], options.lines // 10, model="vllm/m", pause_s=0.5)
                print(f"batchyard is {rate / theirs:,.1f} x as fast as OGX")
        finally:
            for server in servers:
                server.stop()
            upstream.kill()
            upstream.communicate()


if __name__ == "__main__":
    main()
