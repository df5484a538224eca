"""What /openapi.json promises is what the server does, whatever schemathesis sends it."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from served import Server, line, start_batch, until

CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_no_answer_is_a_fault_or_outside_its_schema(request, tmp_path, store):
    options = []
    if store == "postgres":
        options = ["--database", request.getfixturevalue("postgres").new_database()]
    with Server(tmp_path, "--engine", "echo:latency=1ms,fail=5%:400", *options) as server:
        with server.client() as client:
            until(client, start_batch(client, [line(str(n)) for n in range(30)]).id)
        done = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                *("run", server.base_url.removesuffix("/v1") + "/openapi.json"),
                *("--checks", CHECKS, "--max-examples", "12", "--seed", "7", "--no-color"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[done.stdout.find("FAILURES") :]
        _, said = server.stop()
        assert "Traceback" not in said, said


def test_the_document_describes_every_operation(tmp_path):
    with Server(tmp_path, "--engine", "echo") as server:
        document = httpx.get(server.base_url.removesuffix("/v1") + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    rows = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert rows >= {
        ("post", "/v1/batches"),
        ("get", "/v1/batches/{id}/results"),
        ("post", "/v1/uploads/{id}/parts"),
        ("post", "/v1/messages/batches"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/webhook_endpoints/{id}/rotate_secret"),
    }
    create = document["components"]["schemas"]["CreateBatch"]
    assert create["required"] == ["endpoint", "completion_window"]
    assert create["properties"]["metadata"]["anyOf"][0]["maxProperties"] == 16
    ids = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids)) == len(rows)
