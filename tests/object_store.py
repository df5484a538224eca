"""An S3 server of the tests' own (SeaweedFS, from its wheel), in a folder of its own."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BUCKET = "batchyard"


class ObjectStore:
    """Starts when entered."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="batchyard-s3-"))
        self.process = None
        self._made = 0

    def __enter__(self):
        ports = [free_port() for _ in range(10)]
        names = ("master.port", "volume.port", "filer.port", "s3.port")
        options = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
        grpc = ("master.port.grpc", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc")
        options += [f"-{name}={port}" for name, port in zip(grpc, ports[4:8], strict=True)]
        # Further doors that it opens at fixed numbers unless it is told others.
        options += [f"-s3.port.iceberg={ports[8]}", f"-s3.port.lance={ports[9]}"]
        self.endpoint = f"http://127.0.0.1:{ports[3]}"
        self.process = subprocess.Popen(
            [
                shutil.which("weed", path=str(Path(sys.executable).parent)) or "weed",
                "server",
                "-s3",
                "-ip=127.0.0.1",
                f"-dir={self.folder}",
                "-master.volumeSizeLimitMB=64",
                "-volume.max=20",
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends = time.monotonic() + 60
        while not self._makes_a_bucket():
            assert time.monotonic() < ends, "the object store did not start"
            assert self.process.poll() is None, "the object store ended"
            time.sleep(0.2)  # it gives no other signal
        return self

    def _makes_a_bucket(self):
        try:
            request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
            return urllib.request.urlopen(request, timeout=5).status == 200
        except urllib.error.HTTPError as error:
            return error.code == 409
        except OSError:
            return False

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self):
        """What a client needs to know."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }

    def new_url(self):
        """A place that holds nothing."""
        self._made += 1
        return f"s3://{BUCKET}/test{self._made}"


def free_port():
    # The server adds 10,000 to some ports, so they must not be high. Test processes side by side keep apart.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in range(20_000 + 1_000 * (worker % 9), 30_000):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise AssertionError("no port is free")


_given = set()
