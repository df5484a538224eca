"""A real `batchyard serve` in a process of its own, and the real SDK on it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import openai

#: In the order of a Batch's life; a later one is never followed by an earlier one.
ENDED = {"completed", "failed", "cancelled", "expired"}


class Server:
    """Starts when entered; may be killed and started again on the same state."""

    def __init__(self, folder, *arguments, key="none", state="state"):
        self.folder = folder
        self.state = state
        self.arguments = arguments
        self.key = key
        self.process = None
        self.base_url = ""

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        command = [
            sys.executable,
            "-m",
            "batchyard",
            "serve",
            "--port",
            "0",
        ]
        if self.state is not None:
            command += ["--state", str(self.folder / self.state)]
        self.process = subprocess.Popen(
            [*command, *self.arguments], stderr=subprocess.PIPE, text=True, cwd=self.folder
        )
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"Listening on (\S+)", line):
                self.base_url = found[1]
                return
        raise AssertionError(f"the server did not start: {''.join(said)}")

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        code, self.process = self.process.returncode, None
        return code, said

    def client(self, key=None, **options):
        return openai.OpenAI(base_url=self.base_url, api_key=key or self.key, **{"max_retries": 0} | options)


def line(custom_id, content="hello", model="echo", **more):
    body = {"model": model, "messages": [{"role": "user", "content": content}]} | more
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines):
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


def upload(client, lines, name="in.jsonl"):
    data = lines if isinstance(lines, bytes) else jsonl(lines)
    return client.files.create(file=(name, data), purpose="batch")


def start_batch(client, lines, **more):
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h"} | more
    return client.batches.create(input_file_id=upload(client, lines).id, **options)


def until(client, batch_id, *statuses, limit_s=60):
    """The Batch once it has one of *statuses* (by default: has ended)."""
    wanted = set(statuses) or ENDED
    ends = time.monotonic() + limit_s
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in wanted:
            return batch
        assert batch.status not in ENDED, f"ended as {batch.status}: {batch.errors}"
        assert time.monotonic() < ends, f"still {batch.status} after {limit_s} s"
        time.sleep(0.02)  # what every client of this API does: it has no other signal


def results(client, batch):
    """Lines of the output and of the error file, by the SDK's own reader."""
    found = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        lines = [] if file_id is None else list(client.files.content(file_id).iter_lines())
        found.append([json.loads(one) for one in lines])
    return found


def ids(lines):
    return [one["custom_id"] for one in lines]


def log_of(path):
    return path.read_text().split() if os.path.exists(path) else []
