"""`batchyard run` as its users meet it: what it refuses, in which words, with which exit code."""

import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from batchyard.cli import app

ECHO = ["--engine", "echo"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def batchyard(monkeypatch):
    """Run the command in this process; returns exit code, standard output and standard error."""

    def run(*arguments):
        words = ["run", *map(str, arguments)]
        # Messages quote the command as it was typed.
        monkeypatch.setattr(sys, "argv", ["batchyard", *words])
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        return done.exit_code, done.stdout, done.stderr

    return run


def request(custom_id="a", **changes):
    body = {"model": "m", "messages": [{"role": "user", "content": f"Hello {custom_id}"}]}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {**line, **changes}


def write(*lines, path="in.jsonl"):
    Path(path).write_bytes(
        b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
    )
    return path


def results(path="in.results.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@contextmanager
def served():
    """An HTTP server that answers every path with the results file."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            data = Path("in.results.jsonl").read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def without(name):
    line = request()
    del line[name]
    return line


REFUSED = {
    "not JSON": ([request(), b"{oops"], "Line 2: This is not valid JSON"),
    "no custom_id": ([without("custom_id")], 'Line 1: "custom_id" is missing'),
    "custom_id is a number": ([request(custom_id=7)], 'Line 1: "custom_id" is a number; it must be a string'),
    "wrong method": ([request(method="GET")], 'Line 1: "method" is "GET"; it must be "POST"'),
    "unknown url": ([request(url="/v1/chat/completion")], "Did you mean /v1/chat/completions?"),
    "body is a list": ([request(body=[])], 'Line 1: "body" is an array; it must be a JSON object'),
    "repeated id": (
        [request("a"), request("b"), request("a")],
        'Line 3: "custom_id" repeats line 1. Each request needs its own custom_id.',
    ),
    "streaming": ([request(body={"model": "m", "messages": [], "stream": True})], "A Batch cannot stream"),
    "invalid UTF-8": (
        [request(), b'{"custom_id":"\xff"}'],
        "Line 2: Byte 15 of this line (0xff) is no UTF-8",
    ),
    "half surrogate": (
        [b'{"custom_id":"\\ud800","method":"POST","url":"/v1/chat/completions","body":{}}'],
        "Line 1",
    ),
    "deep nesting": ([b"[" * 5000 + b"]" * 5000], "Line 1"),
    "deep nesting in the body": (
        [json.dumps(request()).encode().replace(b'"m"', b"[" * 5000 + b"]" * 5000)],
        "Line 1",
    ),
    "empty": ([], "holds no request"),
    "only blank lines": ([b"", b"   ", b"\r"], "holds no request"),
    "NaN": ([json.dumps(request()).encode().replace(b'"m"', b"NaN")], "Line 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_input_is_refused_with_its_line_and_nothing_runs(batchyard, name):
    lines, message = REFUSED[name]
    code, _, complained = batchyard(write(*lines), *ECHO)
    assert code == 2
    assert message in " ".join(complained.split()) or message in complained
    assert "Traceback" not in complained
    assert not Path("in.results.jsonl").exists()


def test_all_errors_are_told_at_once(batchyard):
    code, _, complained = batchyard(write(*[request("same")] * 40), *ECHO)
    assert code == 2
    assert "Line 2: " in complained
    assert "… and 19 more errors." in complained
    assert "The input was refused: 39 errors. Nothing was run." in complained


def test_after_a_refusal_the_mended_file_runs_with_the_same_command(batchyard):
    assert batchyard(write(request(), b"{"), *ECHO)[0] == 2
    code, said, _ = batchyard(write(request(), request("b")), *ECHO)
    assert code == 0, said
    assert len(results()) == 2


def test_a_line_of_300_megabytes_is_refused_in_bounded_memory(tmp_path):
    with open("in.jsonl", "wb") as file:
        file.write(json.dumps(request()).encode() + b"\n" + b'{"custom_id":"')
        file.writelines(b"x" * 1_000_000 for _ in range(300))
        file.write(b'"}\n' + json.dumps(request("c", method="PUT")).encode() + b"\n")
    script = (
        "import re, sys; sys.argv = ['batchyard', 'run', 'in.jsonl', '--engine', 'echo']\n"
        "from batchyard.__main__ import main\n"
        "try: main()\n"
        # ru_maxrss would include what the parent held when it forked.
        "finally: print(re.search(r'VmHWM:[^0-9]*([0-9]+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Line 2: The line has 300,000,0" in done.stderr
    assert "Line 3: " in done.stderr
    assert int(done.stdout.split()[-1]) < 250_000


def test_what_is_odd_but_fine_is_accepted(batchyard):
    lines = [json.dumps(request(str(i))).encode() for i in range(3)]
    Path("in.jsonl").write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\n  \n" + lines[1] + b"\r\n" + lines[2])
    code, _, complained = batchyard("in.jsonl", *ECHO)
    assert code == 0, complained
    assert [one["custom_id"] for one in results()] == ["0", "1", "2"]


def test_two_models_are_refused_where_the_engine_serves_one(batchyard):
    other = request("b", body={"model": "n", "messages": []})
    code, _, complained = batchyard(write(request(), other), "--engine", "llama")
    assert code == 2
    assert 'Line 2: The model "n" is not the "m" of line 1' in complained


def test_a_prompt_over_the_context_fails_alone_with_the_numbers(batchyard):
    long = request("long", body={"model": "m", "messages": [{"role": "user", "content": "word " * 50}]})
    code, said, _ = batchyard(write(request(), long, request("b")), "--engine", "echo:context_tokens=20")
    assert code == 1
    assert [one["custom_id"] for one in results()] == ["a", "b"]
    (failed,) = results("in.results.errors.jsonl")
    assert failed["response"]["status_code"] == 400
    assert "20" in failed["response"]["body"]["error"]["message"]
    assert "1 request, each with its reason in in.results.errors.jsonl" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "The input missing.jsonl does not exist"),
        (["."], "is a folder"),
        (["in.jsonl", "-o", "nowhere/out.jsonl"], "The folder nowhere for the results does not exist"),
        (["in.jsonl", "-o", "in.jsonl"], "are the same file"),
        (
            ["in.jsonl", "--engine", "gpt"],
            "There is no engine 'gpt'. The engines are: echo, llama, onnx, openai.",
        ),
        (["in.jsonl", "--engine", "openai"], "needs --base-url"),
        (["in.jsonl", "--engine", "echo", "--deadline", "soon"], "--deadline 'soon' is no duration"),
        (["in.jsonl", "--engine", "echo", "--fail-over", "many"], "--fail-over 'many' is no share"),
        (["in.jsonl", "--engine", "echo:speed=9"], "speed=9"),
        (["in.jsonl", "--engine", "echo", "--params", "{"], "holds whole requests already"),
        (
            ["in.jsonl", "--engine", "echo", "--template", "{x}", "--params", "{"],
            "--params is not valid JSON",
        ),
        (["in.jsonl", "--base-url", "http://127.0.0.1:9"], "Cannot reach http://127.0.0.1:9"),
        (["in.jsonl", "--model", "nothing.gguf"], "There is no file nothing.gguf"),
        (["-"], "cannot read a pipe"),
    ],
)
def test_bad_usage_is_one_clear_sentence(batchyard, arguments, message):
    write(request())
    code, _, complained = batchyard(*arguments)
    assert code == 2
    assert message in " ".join(complained.split())


def test_an_output_that_is_there_already_is_not_overwritten(batchyard):
    Path("out.jsonl").write_text("precious\n")
    code, _, complained = batchyard(write(request()), "-o", "out.jsonl", *ECHO)
    assert code == 2
    assert "out.jsonl exists, and it is not of this run" in complained
    assert Path("out.jsonl").read_text() == "precious\n"
    assert batchyard("in.jsonl", "-o", "out.jsonl", "--restart", *ECHO)[0] == 0
    assert len(results("out.jsonl")) == 1


def test_the_same_command_again_tells_that_it_has_ended(batchyard):
    write(request(), request("b"))
    assert batchyard("in.jsonl", "--engine", "echo:fail=b:404")[0] == 1
    before = Path("in.results.jsonl").read_bytes()
    code, said, _ = batchyard("in.jsonl", "--engine", "echo:fail=b:404")
    assert code == 1
    assert "has ended already: 1 of 2 succeeded, 1 failed" in said
    assert "batchyard run --restart in.jsonl --engine echo:fail=b:404" in said
    assert Path("in.results.jsonl").read_bytes() == before


def test_a_damaged_state_is_told_and_a_restart_gets_over_it(batchyard):
    write(request())
    assert batchyard("in.jsonl", *ECHO)[0] == 0
    for path in Path("in.results.jsonl.batchyard").glob("state.db*"):
        path.write_bytes(b"certainly no database" * 200)
    code, _, complained = batchyard("in.jsonl", *ECHO)
    assert code == 2
    assert "damaged or no database" in complained
    assert batchyard("in.jsonl", "--restart", *ECHO)[0] == 0
    assert len(results()) == 1


def test_other_options_do_not_resume_a_run(batchyard):
    write(request())
    batchyard("in.jsonl", *ECHO)
    code, _, complained = batchyard("in.jsonl", "--engine", "echo", "--limit", "1")
    assert code == 2
    assert "had limit not set, now it is 1" in complained
    Path("t.csv").write_text("a,b\n1,2\n")
    batchyard("t.csv", "--template", "{a}", *ECHO)
    code, _, complained = batchyard("t.csv", "--template", "{b}", *ECHO)
    assert code == 2
    assert "had template '{a}', now it is '{b}'" in complained


def test_an_errors_file_of_somebody_else_is_never_touched(batchyard):
    write(request(), request("b"))
    for name in ("precious.jsonl", "in.results.errors.jsonl"):
        Path(name).write_text("precious\n")
        for spec in ("echo", "echo:fail=b:404"):
            code, _, complained = batchyard("in.jsonl", "--engine", spec, "--errors", name)
            assert code == 2
            assert f"{name} exists, and it is not of this run" in complained
            assert Path(name).read_text() == "precious\n"
    Path("in.results.jsonl.part").write_text("mine\n")
    Path("in.results.jsonl.partial").write_text("mine\n")
    assert batchyard("in.jsonl", "--errors", "e.jsonl", *ECHO)[0] == 0
    assert Path("in.results.jsonl.part").read_text() == "mine\n"
    assert Path("in.results.jsonl.partial").read_text() == "mine\n"


def test_a_restart_keeps_old_results_until_new_ones_are_there(batchyard):
    write(request(), request("b"))
    assert batchyard("in.jsonl", "--engine", "echo:fail=b:404")[0] == 1
    before = Path("in.results.jsonl").read_bytes()
    write(request(), b"{bad")
    assert batchyard("in.jsonl", "--restart", *ECHO)[0] == 2
    write(request(), request("b"))
    unreachable = ["--base-url", "http://127.0.0.1:9/v1", "--restart"]
    assert batchyard("in.jsonl", *unreachable)[0] == 2
    assert Path("in.results.jsonl").read_bytes() == before
    assert Path("in.results.errors.jsonl").exists()
    assert batchyard("in.jsonl", "--restart", *ECHO)[0] == 0
    assert len(results()) == 2
    # The error file of the run that was replaced would contradict the new results.
    assert not Path("in.results.errors.jsonl").exists()


def test_answers_without_their_database_are_not_run_again_in_silence(batchyard):
    write(*[request(str(i)) for i in range(50)])
    batchyard("in.jsonl", "--engine", "echo:fail=50%:400", "--fail-over", "0%/10")
    state = Path("in.results.jsonl.batchyard")
    for path in state.glob("state.db*"):
        path.unlink()
    code, _, complained = batchyard("in.jsonl", *ECHO)
    assert code == 2
    assert "holds answers of a run whose database is lost" in " ".join(complained.split())
    assert list(state.glob("segments/*/*.seg"))
    assert batchyard("in.jsonl", "--restart", *ECHO)[0] == 0


def test_an_input_that_changed_after_the_end_is_noticed(batchyard):
    write(request())
    assert batchyard("in.jsonl", *ECHO)[0] == 0
    write(request(), request("new"))
    code, _, complained = batchyard("in.jsonl", *ECHO)
    assert code == 2
    assert "has changed since this run was started" in " ".join(complained.split())


@pytest.mark.parametrize("params", ['{"max_tokens": NaN}', '{"max_tokens": 1e999}', '{"a": Infinity}'])
def test_params_that_are_no_json_are_refused(batchyard, params):
    Path("t.csv").write_text("text\nhello\n")
    code, _, complained = batchyard("t.csv", "--template", "{text}", "--params", params, *ECHO)
    assert code == 2
    assert "--params is not valid JSON" in complained


def test_a_refusal_leaves_no_folder_behind(batchyard):
    batchyard(write(b"{"), *ECHO)
    assert sorted(os.listdir()) == ["in.jsonl"]


def test_strange_names_addresses_and_keys_are_told_in_a_sentence(batchyard, monkeypatch):
    write(request())
    odd = os.fsdecode(b"\xff\xfe.jsonl")
    os.rename(write(request(), path="x.jsonl"), odd)
    for arguments, message in (
        ([odd, *ECHO], "is not in UTF-8"),
        (["in.jsonl", "--base-url", "http://[::1"], "is not usable"),
        (["in.jsonl", "-o", "/dev/null", *ECHO], "is no regular file"),
        (["in.jsonl", "--deadline", "", *ECHO], "is no duration"),
        (["in.jsonl", "--dry-run", "--price", "nan/1", *ECHO], "is no price"),
    ):
        code, _, complained = batchyard(*arguments)
        assert code == 2
        assert message in " ".join(complained.split())
    monkeypatch.setenv("OPENAI_API_KEY", "two\nlines")
    code, _, complained = batchyard("in.jsonl", "--base-url", "http://127.0.0.1:9/v1")
    assert code == 2
    assert "OPENAI_API_KEY holds something that cannot be an API key" in " ".join(complained.split())


def test_rows_of_a_table_become_requests(batchyard):
    Path("t.csv").write_text('id,text\nx,"Hello, you"\ny,Bye\n')
    arguments = ["t.csv", "--template", "Say: {text}", "--id-field", "id", "--system", "Be brief."]
    code, _, complained = batchyard(*arguments, *ECHO)
    assert code == 0, complained
    answers = {one["custom_id"]: one["response"]["body"] for one in results("t.results.jsonl")}
    assert answers["x"]["choices"][0]["message"]["content"] == "Say: Hello, you"
    Path("t.csv").write_text("id,text\nx,changed\n")
    code, _, complained = batchyard(*arguments, *ECHO)
    assert code == 2
    assert "has changed since this run was started" in complained


def test_rows_without_a_template_are_explained(batchyard):
    Path("t.jsonl").write_text('{"title": "a", "text": "b"}\n')
    code, _, complained = batchyard("t.jsonl", *ECHO)
    assert code == 2
    assert "holds rows with the columns 'title', 'text'" in complained
    assert "--template" in complained
    code, _, complained = batchyard("t.jsonl", "--template", "{txt}", *ECHO)
    assert code == 2
    assert "has no column 'txt'" in complained


def test_a_dry_run_estimates_and_writes_nothing(batchyard):
    write(*[request(str(i)) for i in range(50)])
    code, said, _ = batchyard("in.jsonl", "--dry-run", "--price", "1/2", *ECHO)
    assert code == 0
    assert "50 requests, all valid" in said
    assert "Tokens in" in said
    assert "Nothing was run" in said
    assert sorted(os.listdir()) == ["in.jsonl"]


def test_the_canary_stops_early_and_says_how_to_go_on(batchyard):
    write(*[request(str(i)) for i in range(500)])
    code, said, _ = batchyard("in.jsonl", "--engine", "echo:fail=50%:400", "--fail-over", "5%/40")
    assert code == 1
    assert "of the first 40 requests failed" in said
    assert "To run the rest all the same: batchyard run in.jsonl --engine echo:fail=50%:400" in said
    assert not Path("in.results.jsonl").exists()
    code, _, _ = batchyard("in.jsonl", "--engine", "echo:fail=50%:400")
    assert code == 1
    assert len(results()) + len(results("in.results.errors.jsonl")) == 500


def test_json_events_are_all_that_standard_output_carries(batchyard):
    write(request(), request("b"))
    code, said, _ = batchyard("in.jsonl", "--json", "--engine", "echo:fail=b:404")
    events = [json.loads(line) for line in said.splitlines()]
    assert code == 1
    assert [one["event"] for one in events if one["event"] != "run.progress"] == [
        "run.created",
        "engine.ready",
        "run.finished",
    ]
    assert events[-1]["succeeded"] == 1
    assert events[-1]["failed"] == 1
    code, said, _ = batchyard(write(b"{", path="bad.jsonl"), "--json", *ECHO)
    assert [json.loads(line)["event"] for line in said.splitlines()] == ["input.error", "run.refused"]


def test_a_deadline_ends_the_run_with_expired_lines(batchyard):
    write(*[request(str(i)) for i in range(40)])
    arguments = [
        "in.jsonl",
        "--engine",
        "echo:latency=100ms,max_batch=1",
        "--concurrency",
        "2",
        "--deadline",
        "1s",
    ]
    code, _, _ = batchyard(*arguments)
    assert code == 1
    expired = [one for one in results("in.results.errors.jsonl") if one["error"]["code"] == "batch_expired"]
    assert expired
    assert len(results()) + len(expired) == 40


def test_the_output_is_read_line_by_line_by_the_openai_sdk(batchyard):
    """U+2028, U+2029 and U+0085 end a line for the SDK's reader; the output never holds them raw."""
    tricky = "one\u2028two\u0085three\u2029four"
    write(
        request("a\u2028b", body={"model": "m", "messages": [{"role": "user", "content": tricky}]}),
        request("c"),
    )
    assert batchyard("in.jsonl", *ECHO)[0] == 0
    with served() as url:
        client = OpenAI(base_url=url, api_key="none")
        lines = [json.loads(line) for line in client.files.content("in.results.jsonl").iter_lines()]
        client.close()
    assert [one["custom_id"] for one in lines] == ["a\u2028b", "c"]
    assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] == tricky


def test_a_full_disk_pauses_the_run_and_it_resumes_when_there_is_room():
    """A limit on file size stands in for a full disk: the kernel refuses the write in the same place."""
    write(*[request(str(i)) for i in range(600)])
    command = [sys.executable, "-m", "batchyard", "run", "in.jsonl", *ECHO]

    def no_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (220_000, resource.RLIM_INFINITY))

    full = subprocess.run(command, preexec_fn=no_room, capture_output=True, text=True, check=False)
    assert full.returncode == 3, full
    assert "is full" in full.stdout + full.stderr
    assert "Traceback" not in full.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert sorted(int(one["custom_id"]) for one in results()) == list(range(600))
