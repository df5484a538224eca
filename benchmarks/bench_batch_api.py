"""A Batch through the server by the OpenAI API: from the upload's first byte to `completed`.

    python benchmarks/bench_batch_api.py [--lines 5000] [--upload-mb 200]

The upstream answers at once. CPU and memory are those of the server's process alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from bench_gateway import IN_FLIGHT, Server


def peak_mb(server: Server) -> float:
    """The most memory that the server held at once."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def lines(count: int) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "question " + "word " * 60}]}
    return b"".join(
        json.dumps(
            {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        ).encode()
        + b"\n"
        for n in range(count)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=5_000)
    parser.add_argument("--upload-mb", type=int, default=200)
    options = parser.parse_args()
    upstream = subprocess.Popen(
        [sys.executable, "-m", "batchyard.testing.upstream"], stdout=subprocess.PIPE, text=True
    )
    assert upstream.stdout is not None
    url = json.loads(upstream.stdout.readline())["url"]
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "state")
        command = [sys.executable, "-m", "batchyard", "serve", "--base-url", url, "--model", "m"]
        server = Server(
            "batchyard", [*command, "--port", "0", "--state", state, "--concurrency", str(IN_FLIGHT)]
        )
        try:
            with httpx.Client(base_url=server.url, timeout=600) as client:
                data = lines(options.lines)
                before, begun = server.cpu_s(), time.perf_counter()
                file = client.post(
                    "/files", files=[("purpose", (None, "batch")), ("file", ("in.jsonl", data))]
                ).json()
                wanted = {
                    "input_file_id": file["id"],
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                }
                batch = client.post("/batches", json=wanted).json()
                while batch["status"] != "completed":
                    time.sleep(0.05)
                    batch = client.get(f"/batches/{batch['id']}").json()
                took, cpu = time.perf_counter() - begun, server.cpu_s() - before
                assert batch["request_counts"]["completed"] == options.lines
                print(
                    f"{options.lines:,} lines, upload to completed: {took:.2f} s, {options.lines / took:,.0f} "
                    f"requests/s, {cpu / options.lines * 1e6:,.0f} µs CPU a request, peak {peak_mb(server):.0f} MB"
                )
                block = lines(20_000)
                big = block * max(1, (options.upload_mb << 20) // len(block))
                begun = time.perf_counter()
                answer = client.post(
                    "/files", files=[("purpose", (None, "user_data")), ("file", ("big.jsonl", big))]
                )
                took = time.perf_counter() - begun
                assert answer.status_code == 200, answer.text
                megabytes = len(big) / 1e6
                print(
                    f"Upload of {megabytes:.0f} MB: {megabytes / took:.0f} MB/s, peak {peak_mb(server):.0f} MB"
                )
        finally:
            server.stop()
            upstream.kill()
            upstream.communicate()


if __name__ == "__main__":
    main()
