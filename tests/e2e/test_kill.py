"""`kill -9` at any moment: the same command goes on, and every custom_id ends exactly once."""

import json
import os
import random
import resource
import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "batchyard", "run"]


def write_requests(path, count):
    with path.open("w") as file:
        for i in range(count):
            body = {"model": "m", "messages": [{"role": "user", "content": f"question {i}"}]}
            line = {
                "custom_id": f"request-{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")


def read_ids(*paths):
    texts = [path.read_text(encoding="ascii") for path in paths if path.exists()]
    return [json.loads(line)["custom_id"] for text in texts for line in text.splitlines()]


def calls_until(pipe, count):
    """Read up to *count* calls that the engine logs; fewer when the process ended."""
    calls = []
    while len(calls) < count and (line := pipe.readline()):
        calls.append(line.strip())
    return calls


@pytest.mark.timeout(300)
def test_killed_at_twenty_random_moments_every_request_is_answered_exactly_once(tmp_path):
    dice = random.Random(20)
    total, concurrency, kills = 2000, 8, 20
    source, output, log = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "calls"
    write_requests(source, total)
    os.mkfifo(log)
    spec = f"echo:max_batch=1,latency=0.5ms..2ms,fail=request-9?:400,log={log}"
    command = [*COMMAND, source, "-o", output, "--engine", spec, "--concurrency", str(concurrency)]
    calls = []
    for _ in range(kills):
        # The engine opens the pipe when it starts; reading from it is the signal that work goes on.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with open(log) as pipe:
            calls += calls_until(pipe, dice.randint(1, 2 * (total - len(set(calls))) // kills))
            process.send_signal(signal.SIGKILL)
            process.wait()
            calls += [line.strip() for line in pipe]
        process.stderr.close()
        if process.returncode != -signal.SIGKILL:
            break
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with open(log) as pipe:
        calls += [line.strip() for line in pipe]
    complained = process.stderr.read().decode()
    assert process.wait() == 1, complained
    assert "Traceback" not in complained, complained
    process.stderr.close()

    errors = tmp_path / "out.errors.jsonl"
    ids = read_ids(output, errors)
    assert sorted(ids) == sorted(f"request-{i}" for i in range(total))
    assert read_ids(errors) == [f"request-9{i}" for i in range(10)]
    assert read_ids(output) == sorted(read_ids(output), key=lambda one: int(one.split("-")[1]))
    assert len(calls) - total <= kills * concurrency


def test_killed_between_the_last_answer_and_the_join_it_only_joins(tmp_path):
    """Completed chunks are joined by the next run, with no call to the engine at all."""
    source, output, log = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "calls"
    write_requests(source, 1000)
    command = [*COMMAND, source, "-o", output, "--engine", f"echo:log={log}"]

    # A limit on file size that the segments of two chunks keep and the joined output does not.
    def small():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))

    first = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=small)
    assert first.returncode in {2, 3}, first
    assert "out.jsonl" in first.stderr
    assert not output.exists()
    log.unlink()
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second
    assert len(read_ids(output)) == 1000
    assert not log.exists() or log.read_text() == ""


def test_ctrl_c_keeps_every_finished_answer_and_tells_how_to_resume(tmp_path):
    source, output, log = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "calls"
    write_requests(source, 400)
    os.mkfifo(log)
    command = [*COMMAND, source, "-o", output, "--concurrency", "4"]
    command += ["--engine", f"echo:max_batch=1,latency=1ms,log={log}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with open(log) as pipe:
        calls = calls_until(pipe, 100)
        process.send_signal(signal.SIGINT)
        calls += [line.strip() for line in pipe]
    said, complained = process.communicate()
    assert process.returncode == 3, complained
    assert "Interrupted." in said
    assert "The same command goes on from here: batchyard run" in said
    partial = read_ids(tmp_path / "out.jsonl.batchyard" / "partial.jsonl")
    assert len(partial) >= len(calls) - 4
    assert not output.exists()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with open(log) as pipe:
        more = [line.strip() for line in pipe]
    said, complained = process.communicate()
    assert process.returncode == 0, complained
    assert f"{len(partial)} of 400 were finished before" in said
    assert not set(more) & set(partial)
    assert sorted(read_ids(output)) == sorted(f"request-{i}" for i in range(400))
    assert not (tmp_path / "out.jsonl.batchyard" / "partial.jsonl").exists()


@pytest.mark.model
@pytest.mark.timeout(400)
def test_a_run_on_a_real_model_killed_at_three_moments_answers_every_request_once(tmp_path):
    total = 48
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for i in range(total):
            body = {"messages": [{"role": "user", "content": f"Say the number {i}."}], "max_tokens": 16}
            line = {
                "custom_id": f"request-{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
    command = [*COMMAND, source, "-o", output, "--engine", "llama", "--concurrency", "4", "--json"]
    finished_before = 0
    for share in (0.1, 0.4, 0.7):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "run.resumed":
                # What was finished before the kill is kept.
                assert event["done"] >= finished_before
            if event["event"] == "run.progress" and event["done"] >= share * total:
                finished_before = event["done"]
                break
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
    last = subprocess.run(command, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stdout + last.stderr
    assert read_ids(output) == [f"request-{i}" for i in range(total)]
    for line in output.read_text().splitlines():
        body = json.loads(line)["response"]["body"]
        assert body["model"] == "smollm2-135m-instruct"
        assert body["choices"][0]["message"]["content"]
