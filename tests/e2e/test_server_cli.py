"""The command line on a server: the same words as the API, the same truth, and JSON everywhere."""

import contextlib
import http.server
import json
import subprocess
import sys
import threading

import pytest
from served import Server, ids, jsonl, line, start_batch, until


@pytest.fixture
def server(tmp_path):
    engine = "echo:max_batch=1,latency=5ms,fail=bad*:400"
    with Server(tmp_path, "--engine", engine, "--concurrency", "4") as server:
        yield server


@pytest.fixture
def batchyard(tmp_path, server):
    """Runs a command against the server and gives code, output and what was said beside it."""

    def run(name, *arguments):
        command = [sys.executable, "-m", "batchyard", name, *arguments, "--server", server.base_url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def write(tmp_path, names, **more):
    (tmp_path / "in.jsonl").write_bytes(jsonl([line(one, **more) for one in names]))
    return [f"{one}" for one in names]


def test_from_submit_to_results(tmp_path, batchyard):
    names = write(tmp_path, [f"r{n}" for n in range(200)] + ["bad1"])
    code, said, _ = batchyard(
        "submit", "in.jsonl", "--window", "2h", "--metadata", "team=a", "--priority", "3", "--json"
    )
    batch = json.loads(said)
    assert (code, batch["priority"], batch["metadata"], batch["completion_window"]) == (
        0,
        3,
        {"team": "a"},
        "2h",
    )
    code, said, _ = batchyard("results", batch["id"], "--follow")
    assert (code, sorted(ids(map(json.loads, said.splitlines())))) == (0, sorted(names))
    code, said, _ = batchyard("watch", batch["id"])
    assert code == 1
    assert "200 of 201 succeeded, 1 failed" in said
    assert "HTTP 400" in said
    code, said, _ = batchyard("status", batch["id"], "--json")
    assert json.loads(said)["failures"][0]["example_custom_id"] == "bad1"
    code, _, _ = batchyard("results", batch["id"], "-o", "out.jsonl", "--failed")
    assert [json.loads(one)["custom_id"] for one in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        "bad1"
    ]
    code, said, _ = batchyard("retry", batch["id"], "--kind", "HTTP 400")
    again = said.strip()
    assert again.startswith("batch_")
    code, said, _ = batchyard("list", "--metadata", "team=a", "--limit", "1")
    assert said.splitlines()[0].startswith(again)
    code, said, _ = batchyard("list", "--json")
    assert [one["id"] for one in json.loads(said)] == [again, batch["id"]]


def test_submit_and_watch_in_one(tmp_path, batchyard):
    write(tmp_path, [f"r{n}" for n in range(100)])
    code, said, _ = batchyard("submit", "in.jsonl", "--watch")
    assert code == 0
    assert "100 of 100 succeeded" in said
    code, said, _ = batchyard("submit", "in.jsonl", "--watch", "--json")
    assert code == 0
    assert json.loads(said.splitlines()[-1])["status"] == "completed"


def test_hold_amend_go_on_and_cancel(tmp_path, batchyard, server):
    with server.client() as client:
        batch = start_batch(client, [line(f"r{n}", "say this") for n in range(2000)])
        until(client, batch.id, "in_progress")
        for name, status in (("pause", "paused"), ("resume", "in_progress"), ("pause", "paused")):
            code, said, _ = batchyard(name, batch.id)
            assert (code, said) == (0, f"{batch.id} is {status}.\n")
        code, said, _ = batchyard(
            "amend", batch.id, "--replace", "this", "that", "--body", '{"seed": 1}', "--json"
        )
        assert json.loads(said)["amendments"][0]["change"] == {
            "body": {"seed": 1},
            "replace_text": [{"find": "this", "with": "that"}],
        }
        code, said, _ = batchyard("cancel", batch.id, "--prefix", "r1", "--request", "r1999")
        code, said, _ = batchyard("cancel", batch.id, "--request", "r1999", "--request", "none")
        assert (code, "Cancelled 1" in said) == (2, True)
        code, said, _ = batchyard("cancel", batch.id)
        assert code == 0
        until(client, batch.id)
        code, said, _ = batchyard("status", batch.id)
        assert "never ran" in said
        assert "Saved" in said


def test_an_estimate_makes_nothing(tmp_path, batchyard, server):
    write(tmp_path, ["a", "b"])
    code, said, _ = batchyard("submit", "in.jsonl", "--estimate")
    assert (code, "Requests  2" in said) == (0, True)
    write(tmp_path, ["a", "a"])
    code, said, _ = batchyard("submit", "in.jsonl", "--estimate")
    assert (code, "Line 2" in said) == (2, True)
    with server.client() as client:
        assert list(client.batches.list()) == list(client.files.list()) == []


def test_what_is_wrong_is_said_in_words(tmp_path, batchyard, run_batchyard):
    (tmp_path / "odd.jsonl").write_text("no json\n")
    write(tmp_path, ["a"])
    for arguments, words in (
        (("status", "batch_none"), "No batch found"),
        (("submit", "missing.jsonl"), "missing.jsonl cannot be read"),
        (("submit", "odd.jsonl"), "does not begin with a request"),
        (("submit", "in.jsonl", "--endpoint", "/v1/x"), "Supported values"),
        (("submit", "odd.jsonl", "--endpoint", "/v1/embeddings"), "Must be .jsonl"),
        (("list", "--metadata", "x"), "is no pair"),
        (("list", "--status", "odd"), "Supported values"),
        (("amend", "batch_x", "--body", "{"), "not valid JSON"),
        (("results", "batch_none", "--follow"), "No batch found"),
        (("results", "batch_none", "-o", "no/folder"), "cannot be written"),
    ):
        code, said, beside = batchyard(*arguments)
        assert (code, words in said + beside) == (2, True), (arguments, said, beside)
    for server, words in (("http://127.0.0.1:1/v1", "does not answer"), ("nowhere", "is no address")):
        done = run_batchyard("list", "--server", server)
        assert (done.returncode, words in done.stderr) == (2, True)
    done = run_batchyard("list", "--api-key-env", "NOT_SET_ANYWHERE")
    assert (done.returncode, "NOT_SET_ANYWHERE is not set" in done.stderr) == (2, True)


def test_results_and_progress_are_followed_through_a_restart(tmp_path, server):
    with server.client() as client:
        names = [f"r{n}" for n in range(1500)]
        batch = start_batch(client, [line(one) for one in names])
        until(client, batch.id, "in_progress")
    port = server.base_url.rsplit(":", 1)[1].split("/")[0]
    command = [sys.executable, "-m", "batchyard"]
    at = ["--server", server.base_url]
    with contextlib.ExitStack() as stack:
        follow, watch = (
            stack.enter_context(child([*command, *words, batch.id, *at], tmp_path))
            for words in (["results", "--follow"], ["watch"])
        )
        seen = [json.loads(follow.stdout.readline())["custom_id"] for _ in range(50)]
        assert watch.stdout.readline()
        server.kill()
        server.arguments = [*server.arguments, "--port", port]
        server.start()
        seen += [json.loads(one)["custom_id"] for one in follow.stdout]
        assert sorted(seen) == sorted(names)
        assert "1,500 of 1,500 succeeded" in watch.stdout.read()
        assert (follow.wait(timeout=30), watch.wait(timeout=30)) == (0, 0)


@contextlib.contextmanager
def child(command, folder):
    """A process whose output is read, and which does not outlive its test."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_that_goes_away_once_the_batch_has_ended_is_waited_for(run_batchyard):
    """Each of the calls that `watch` makes after its first may meet a server that restarts."""
    asked = []

    class Away(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if len(asked) in (2, 4):
                return  # no answer: the connection closes
            status = "in_progress" if len(asked) == 1 else "completed"
            counts = {"total": 1, "completed": 1, "failed": 0, "never_ran": 0, "cancelled": 0}
            batch = {"status": status, "request_counts": counts, "waiting_for": None}
            batch |= {
                "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
                "expires_at": 4e9,
                "errors": None,
                "saved": None,
            }
            batch |= {"id": "batch_1", "output_file_id": None, "error_file_id": None}
            body = json.dumps({"data": []} if self.path.endswith("/errors") else batch).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Away) as away:
        threading.Thread(target=away.serve_forever, daemon=True).start()
        done = run_batchyard("watch", "batch_1", "--server", f"http://127.0.0.1:{away.server_port}/v1")
        away.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.rsplit("/", 1)[1] for path in asked] == ["batch_1"] * 3 + ["errors"] * 2
