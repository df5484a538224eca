"""Cancel, pause, expire, kill, stop, revoke: whatever happens to a server's Batches, the files tell the truth."""

import asyncio
import json
import random
import resource
import time
from collections import Counter

import httpx
import openai
import pytest
from served import Server, ids, jsonl, line, log_of, results, start_batch, until, upload

from batchyard.engines.echo import EchoEngine
from batchyard.events import EventBus
from batchyard.service.hosting.host import Host, NewBatch
from batchyard.service.hosting.served import Served


def each_once(client, batch, wanted):
    """Every request stands in exactly one of the files, exactly once, and the counts say the same."""
    done, failed = results(client, batch)
    assert Counter(ids(done) + ids(failed)) == Counter(wanted)
    never_ran = [
        one for one in failed if (one["error"] or {}).get("code") in {"batch_cancelled", "batch_expired"}
    ]
    counts = batch.request_counts
    assert counts.total == len(wanted)
    assert counts.completed == len(done)
    assert counts.failed == len(failed) - len(never_ran)
    return done, failed, never_ran


def test_a_cancel_keeps_what_is_finished_and_gives_the_rest_its_line(tmp_path, place):
    log = tmp_path / "calls"
    engine = f"echo:max_batch=1,latency=30ms,log={log}"
    with Server(tmp_path, "--engine", engine, "--concurrency", "4") as server:
        with server.client() as client:
            wanted = [str(n) for n in range(2000)]
            batch = start_batch(client, [line(one) for one in wanted])
            while client.batches.retrieve(batch.id).request_counts.completed < 20:
                pass
            cancelling = client.batches.cancel(batch.id)
            assert cancelling.status in {"cancelling", "cancelled"}
            assert client.batches.cancel(batch.id).id == batch.id
            batch = until(client, batch.id)
            assert batch.status == "cancelled"
            assert batch.cancelling_at <= batch.cancelled_at
            done, failed, never_ran = each_once(client, batch, wanted)
            assert len(done) >= 20
            assert failed == never_ran
            # What had not been dispatched never was.
            assert len(set(log_of(log))) <= len(done) + 4
            assert client.batches.cancel(batch.id).status == "cancelled"
            again = until(client, start_batch(client, [line("x")]).id)
            begun = time.monotonic()
            with pytest.raises(openai.ConflictError) as caught:
                client.with_options(max_retries=5).batches.cancel(again.id)
            assert "completed" in caught.value.message
            # The SDK retries a 409 with growing pauses, unless it is told not to.
            assert time.monotonic() - begun < 0.5


def test_a_paused_batch_dispatches_nothing_until_it_is_resumed(tmp_path, place):
    log = tmp_path / "calls"
    engine = f"echo:max_batch=1,latency=10ms,log={log}"
    with Server(tmp_path, "--engine", engine, "--concurrency", "4") as server:
        with server.client() as client:
            wanted = [str(n) for n in range(300)]
            batch = start_batch(client, [line(one) for one in wanted])
            while client.batches.retrieve(batch.id).request_counts.completed < 10:
                pass
            client.post(f"/batches/{batch.id}/pause", cast_to=object)
            until(client, batch.id, "paused")
            # Another Batch still runs through, so the engine was free to take the paused one's requests.
            until(client, start_batch(client, [line(f"other-{n}") for n in range(50)]).id)
            before = [one for one in log_of(log) if not one.startswith("other")]
            until(client, start_batch(client, [line(f"other-{n}") for n in range(50)]).id)
            assert [one for one in log_of(log) if not one.startswith("other")] == before
            client.post(f"/batches/{batch.id}/resume", cast_to=object)
            batch = until(client, batch.id)
            assert batch.status == "completed"
            each_once(client, batch, wanted)
            with pytest.raises(openai.ConflictError):
                client.post(f"/batches/{batch.id}/pause", cast_to=object)


async def test_at_the_end_of_its_window_a_batch_expires_with_what_it_has(tmp_path):
    ended = asyncio.Event()
    events = EventBus()
    events.subscribe(lambda event: event.fields.get("status") == "expired" and ended.set())
    served = Served("echo", EchoEngine.from_spec("latency=20ms,max_batch=1"), 2, 0.0)
    host = Host(tmp_path / "state", [served], events=events)
    await host.open()
    try:
        incoming = host.files.begin()
        incoming.write(jsonl([line(str(n)) for n in range(500)]))
        file = await host.kept(
            lambda: host.files.keep(incoming, "t", purpose="batch", filename="a.jsonl", expires_s=None)
        )
        made = await host.create("t", NewBatch(file.id, file.id, "/v1/chat/completions", "1s", 1.0))
        async with asyncio.timeout(30):
            await ended.wait()
        batch = await host.get("t", made.id)
        counts = await host.counts(batch)
        done = host.files.path(batch.output_file_id).read_bytes().splitlines()
        late = [json.loads(one) for one in host.files.path(batch.error_file_id).read_bytes().splitlines()]
    finally:
        await host.close()
    assert len(done) + len(late) == 500
    assert {one["error"]["code"] for one in late} == {"batch_expired"}
    assert (counts.completed, counts.failed) == (len(done), 0)
    assert 0 < len(done) < 500


@pytest.mark.slow
def test_killed_at_twenty_moments_each_request_is_answered_once(tmp_path, place):
    log = tmp_path / "calls"
    server = Server(tmp_path, "--engine", f"echo:max_batch=1,latency=15ms,log={log}", "--concurrency", "16")
    chance = random.Random(7)
    wanted = [f"{n}" for n in range(700)]
    with server:
        with server.client() as client:
            made = [start_batch(client, [line(f"{k}-{one}") for one in wanted]).id for k in range(3)]
        seen = dict.fromkeys(made, "")
        for _ in range(20):
            time.sleep(chance.uniform(0.0, 0.25))  # a random moment is the point
            server.kill()
            server.start()
            with server.client() as client:
                for one in made:
                    status = client.batches.retrieve(one).status
                    # What has ended stays as it ended.
                    assert seen[one] in {"", status} or seen[one] not in {"completed", "failed"}
                    seen[one] = status
        with server.client() as client:
            for k, one in enumerate(made):
                batch = until(client, one)
                assert batch.status == "completed"
                each_once(client, batch, [f"{k}-{number}" for number in wanted])
            files = [one.id for one in client.files.list(purpose="batch_output")]
            assert len(files) == len(set(files)) == 3
    calls = Counter(log_of(log))
    # A kill repeats at most what was in flight.
    assert sum(calls.values()) - len(calls) <= 20 * 16
    left = [one.name for one in (tmp_path / "state" / "files").iterdir() if one.name.startswith(".")]
    assert left == []


def test_cancelled_while_the_server_was_down_stays_cancelled(tmp_path, place):
    server = Server(tmp_path, "--engine", "echo:max_batch=1,latency=50ms", "--concurrency", "2")
    with server:
        with server.client() as client:
            wanted = [str(n) for n in range(400)]
            batch = start_batch(client, [line(one) for one in wanted])
            until(client, batch.id, "in_progress")
            client.batches.cancel(batch.id)
        server.kill()
        server.start()
        with server.client() as client:
            batch = until(client, batch.id)
            assert batch.status == "cancelled"
            each_once(client, batch, wanted)


def test_a_stop_keeps_what_is_finished_and_the_next_start_goes_on(tmp_path, place):
    server = Server(tmp_path, "--engine", "echo:max_batch=1,latency=20ms", "--concurrency", "4")
    with server:
        with server.client() as client:
            wanted = [str(n) for n in range(300)]
            batch = start_batch(client, [line(one) for one in wanted])
            while client.batches.retrieve(batch.id).request_counts.completed < 10:
                pass
        code, said = server.stop()
        assert code == 0, said
        assert "Traceback" not in said
        server.start()
        with server.client() as client:
            batch = client.batches.retrieve(batch.id)
            assert batch.request_counts.completed >= 10
            each_once(client, until(client, batch.id), wanted)


def holds(client):
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True


def test_keys_part_tenants_and_a_revoked_key_is_refused(tmp_path, place, run_batchyard):
    def key_for(tenant):
        made = run_batchyard("keys", "create", "mine", "--tenant", tenant, *place, "--json")
        return json.loads(made.stdout)

    one, other = key_for("one"), key_for("other")
    with Server(tmp_path, "--engine", "echo", key=one["key"]) as server:
        for wrong in ("x", "by-wrong", one["key"][:-1]):
            answer = httpx.get(f"{server.base_url}/files", headers={"authorization": f"Bearer {wrong}"})
            assert answer.status_code == 401
        with server.client() as client, server.client(other["key"]) as stranger:
            batch = until(client, start_batch(client, [line("a")]).id)
            for call in (
                lambda: stranger.batches.retrieve(batch.id),
                lambda: stranger.batches.cancel(batch.id),
                lambda: stranger.files.retrieve(batch.input_file_id),
                lambda: stranger.files.content(batch.output_file_id),
                lambda: stranger.files.delete(batch.output_file_id),
                lambda: stranger.batches.list(after=batch.id),
                lambda: stranger.post(f"/batches/{batch.id}/pause", cast_to=object),
            ):
                with pytest.raises(openai.NotFoundError):
                    call()
            assert list(stranger.files.list()) == []
            assert list(stranger.batches.list()) == []
            # A file of somebody else is one that is not there.
            made = stranger.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            assert until(stranger, made.id).status == "failed"
            assert (
                httpx.get(f"{server.base_url}/models", headers={"x-api-key": one["key"]}).status_code == 200
            )
            run_batchyard("keys", "revoke", one["id"], *place)
            revoked = time.monotonic()
            while holds(client):
                assert time.monotonic() - revoked < 1.0
            assert stranger.models.list().data


def test_no_public_address_without_a_key(tmp_path, run_batchyard):
    refused = run_batchyard("serve", "--engine", "echo", "--host", "0.0.0.0", "--state", "state")
    assert refused.returncode == 2
    assert "keys create" in refused.stderr


def test_settings_come_from_the_file_and_mistakes_are_named(tmp_path, run_batchyard):
    config = tmp_path / "batchyard.toml"
    config.write_text(
        'state = "kept"\n[[model]]\nname = "fast"\nengine = "echo"\n[[model]]\nname = "slow"\nengine = "echo:max_batch=1,latency=5ms"\n'
    )
    with Server(tmp_path, "--config", str(config)) as server, server.client() as client:
        assert {one.id for one in client.models.list()} == {"fast", "slow"}
        batch = until(client, start_batch(client, [line("a", model="slow")]).id)
        assert batch.model == "slow"
    for text, word in (
        ("port = 'x'\n", "port"),
        ("colour = 1\n", "colour"),
        ("[[model]\n", "no TOML"),
        ('[[model]]\nname = "a"\nengine = "abacus"\n', "abacus"),
    ):
        config.write_text(text)
        refused = run_batchyard("serve", "--config", str(config), "--port", "0")
        assert refused.returncode == 2, text
        assert word in refused.stderr


async def test_a_client_that_hangs_up_stops_the_engine(tmp_path):
    with Server(tmp_path, "--engine", "echo:max_batch=1,latency=30s", "--concurrency", "1") as server:
        body = {"model": "echo", "messages": [{"role": "user", "content": "long"}]}
        async with httpx.AsyncClient() as client:
            for more in ({}, {"stream": True}):
                for _ in range(3):
                    # With one slot, the next of these only gets a turn once the last one was given up.
                    with pytest.raises(httpx.ReadTimeout):
                        await client.post(
                            f"{server.base_url}/chat/completions",
                            json=body | more,
                            timeout=httpx.Timeout(30, read=0.3),
                        )
        with server.client() as client:
            batch = start_batch(client, [line("a")])
            until(client, batch.id, "in_progress")
            client.batches.cancel(batch.id)
            assert until(client, batch.id).status == "cancelled"


def test_a_form_that_ends_early_leaves_nothing_behind(tmp_path):
    with Server(tmp_path, "--engine", "echo") as server:
        head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + jsonl(
            [line("a")]
        )
        form = {"content-type": "multipart/form-data; boundary=b"}
        answer = httpx.post(f"{server.base_url}/files", content=head, headers=form)
        assert answer.status_code == 400
        with server.client() as client:
            assert list(client.files.list()) == []
            assert upload(client, [line("a")]).id
        assert len(list((tmp_path / "state" / "files").iterdir())) == 1


def test_without_room_on_the_disk_a_batch_waits_and_reads_are_answered(tmp_path):
    with Server(tmp_path, "--engine", "echo:max_batch=1,latency=5ms", "--concurrency", "8") as server:
        with server.client() as client:
            wanted = [str(n) for n in range(1500)]
            batch = start_batch(client, [line(one) for one in wanted])
            while client.batches.retrieve(batch.id).request_counts.completed < 20:
                pass
            # No file may grow beyond this: what a full disk is to those who write.
            _, hard = resource.prlimit(
                server.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY)
            )
            ends = time.monotonic() + 60
            while (now := client.batches.retrieve(batch.id)).waiting_for is None:
                assert now.status == "in_progress"
                assert time.monotonic() < ends
            assert now.request_counts.completed >= 20
            with pytest.raises(openai.InternalServerError) as caught:
                upload(client, [line(str(n), "word " * 100) for n in range(500)])
            assert caught.value.status_code == 503
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
            batch = until(client, batch.id)
            assert batch.status == "completed"
            each_once(client, batch, wanted)
