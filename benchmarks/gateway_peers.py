"""Peers of the server, each installed in an environment of its own (their names: requirements/peers-server.txt).

LiteLLM's proxy for live requests; OGX (the successor of Llama Stack) for `/v1/batches`, on SQLite, with as
many requests in flight as it is told.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median

OGX = """
version: 2
distro_name: bench
apis: [batches, files, inference]
providers:
  inference:
  - provider_id: vllm
    provider_type: remote::vllm
    config:
      base_url: {url}
      api_token: fake
      network: {{tls: {{verify: false}}}}
  files:
  - provider_id: files
    provider_type: inline::localfs
    config:
      storage_dir: {folder}/files
      metadata_store: {{table_name: files_metadata, backend: sql_default}}
  batches:
  - provider_id: reference
    provider_type: inline::reference
    config:
      sqlstore: {{table_name: batches, backend: sql_default}}
      max_concurrent_requests_per_batch: {in_flight}
storage:
  backends:
    kv_default: {{type: kv_sqlite, db_path: {folder}/kv.db}}
    sql_default: {{type: sql_sqlite, db_path: {folder}/sql.db}}
  stores:
    metadata: {{namespace: registry, backend: kv_default}}
    inference: {{table_name: inference_store, backend: sql_default}}
    conversations: {{table_name: conversations, backend: sql_default}}
    prompts: {{table_name: prompts, backend: sql_default}}
    connectors: {{table_name: connectors, backend: sql_default}}
registered_resources:
  models:
  - {{model_id: m, provider_id: vllm, provider_model_id: m, model_type: llm, metadata: {{}}}}
server: {{port: {port}}}
"""
LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "{url}", api_key: none}}
general_settings: {{master_key: sk-bench}}
litellm_settings: {{telemetry: false}}
"""


class Measured:
    """A server in a process of its own, and what was measured of it."""

    def __init__(
        self, name: str, command: list[str], *, url: str = "", key: str = "none", **environment: str
    ):
        self.name = name
        self.key = key
        self.url = url
        # What its children take is counted too, once they are in a group of their own.
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if url else subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        if url:
            self._until_it_answers()
        else:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                if found := re.search(r"Listening on (\S+)", line):
                    self.url = found[1]
                    break
        self.rates: list[float] = []
        self.cpus_us: list[float] = []
        self.p50_ms: list[float] = []
        self.p99_ms: list[float] = []

    def _until_it_answers(self) -> None:
        ends = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/models", timeout=5)
            except urllib.error.HTTPError:
                return
            except OSError:
                assert self.process.poll() is None, f"{self.name} did not start"
                assert time.monotonic() < ends, f"{self.name} does not answer"
                time.sleep(0.5)
            else:
                return

    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """The most memory that it held at once."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def share_of(self, floor: Measured) -> float:
        """Its rate as a part of another's, measured in turns."""
        return median(ours / bare for ours, bare in zip(self.rates, floor.rates, strict=True))

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def litellm(python: str, upstream: str, folder: Path) -> Measured:
    """LiteLLM's proxy before *upstream*, with a master key as it demands one."""
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(LITELLM.format(url=upstream))
    command = [str(Path(python).with_name("litellm")), "--config", str(config), "--port", str(port)]
    return Measured(
        "LiteLLM proxy",
        [*command, "--host", "127.0.0.1", "--num_workers", "1"],
        url=f"http://127.0.0.1:{port}/v1",
        key="sk-bench",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_LOG="ERROR",
    )


def ogx(python: str, upstream: str, folder: Path, in_flight: int) -> Measured:
    """OGX before *upstream*, its files and databases in *folder*."""
    port = free_port()
    config = folder / "ogx.yaml"
    config.write_text(OGX.format(url=upstream, folder=folder, in_flight=in_flight, port=port))
    command = [str(Path(python).with_name("ogx")), "run", str(config), "--port", str(port), "--insecure"]
    return Measured("OGX, SQLite", command, url=f"http://127.0.0.1:{port}/v1")
