"""Several server processes on one PostgreSQL database: each may die, or freeze, and every line stands once."""

import random
import signal
import time
from collections import Counter

import openai
import pytest
from served import Server, ids, line, log_of, results, start_batch, until

ENDED = {"completed", "failed", "cancelled", "expired"}


@pytest.fixture(params=["folder", "objects"])
def blobs(request, monkeypatch):
    """Where blobs lie: in a folder that all share, or in an object store."""
    if request.param == "folder":
        return None
    server = request.getfixturevalue("object_store")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server.new_url()


def servers(tmp_path, postgres, blobs, count=2, *, latency="10ms", lease_s=1.0, fail=""):
    url = postgres.new_database()
    made = []
    for n in range(count):
        folder = tmp_path / f"server{n}"
        folder.mkdir()
        # Each process has a folder of its own where blobs are objects, else they share one.
        state = folder / "state" if blobs else tmp_path / "state"
        settings = f'database = "{url}"\nlease_s = {lease_s}\nstate = "{state}"\n'
        if blobs:
            settings += f'blobs = "{blobs}"\n'
        (folder / "batchyard.toml").write_text(settings)
        engine = f"echo:max_batch=1,latency={latency},log={tmp_path / f'calls{n}'}{fail}"
        made.append(Server(folder, "--engine", engine, "--concurrency", "4", state=None))
    return made


def checked(client, batch_id, wanted, *statuses):
    batch = until(client, batch_id, limit_s=90)
    assert batch.status in (statuses or {"completed"})
    done, failed = results(client, batch)
    assert Counter(ids(done) + ids(failed)) == Counter(wanted)
    counts = batch.request_counts
    assert counts.completed == len(done)
    assert counts.completed + counts.failed + counts.never_ran == counts.total == len(wanted)
    return batch, done, failed


def test_two_servers_share_the_work_of_a_batch(tmp_path, postgres, blobs):
    one, two = servers(tmp_path, postgres, blobs)
    with one, two, one.client() as client, two.client() as other:
        wanted = [f"r{n}" for n in range(3000)]
        batch = start_batch(client, [line(name) for name in wanted])
        assert other.batches.retrieve(batch.id).id == batch.id
        _, done, _ = checked(other, batch.id, wanted)
        assert ids(done) == wanted
        calls = [log_of(tmp_path / f"calls{n}") for n in range(2)]
        assert min(map(len, calls)) > 300
        # Nothing went wrong, so nothing was asked twice.
        assert len(calls[0]) + len(calls[1]) == len(wanted)


def test_one_server_may_be_killed_and_another_frozen_past_its_lease(tmp_path, postgres, blobs):
    made = servers(tmp_path, postgres, blobs, 3, latency="5ms", fail=",fail=*7:400")
    killed, frozen, third = made
    with killed, frozen, third:
        wanted = {}
        with third.client() as client:
            for k in range(2):
                names = [f"{k}-{n}" for n in range(2500)]
                wanted[start_batch(client, [line(name) for name in names]).id] = names
            cancelled = start_batch(client, [line(f"c-{n}") for n in range(2500)])
            wanted[cancelled.id] = [f"c-{n}" for n in range(2500)]
            while sum(client.batches.retrieve(one).request_counts.completed for one in wanted) < 300:
                pass
        frozen.process.send_signal(signal.SIGSTOP)
        killed.kill()
        with third.client() as client:
            client.batches.cancel(cancelled.id)
            while sum(client.batches.retrieve(one).request_counts.completed for one in wanted) < 1200:
                pass
            frozen.process.send_signal(signal.SIGCONT)
            for batch_id, names in wanted.items():
                status = "cancelled" if batch_id == cancelled.id else "completed"
                checked(client, batch_id, names, status)
            # The one that was frozen says the same, and what has ended stays as it ended.
            with frozen.client() as other:
                for batch_id in wanted:
                    assert other.batches.retrieve(batch_id) == client.batches.retrieve(batch_id)
                checked(other, start_batch(other, [line("a"), line("b")]).id, ["a", "b"])
        code, said = frozen.stop()
        assert (code, "Traceback" in said) == (0, False), said
    calls = Counter(name for n in range(3) for name in log_of(tmp_path / f"calls{n}"))
    # What was in flight in the two, or known to the frozen one alone, may have been asked twice.
    assert all(count <= 3 for count in calls.values())


@pytest.mark.slow
def test_servers_killed_at_random_moments_lose_and_double_nothing(tmp_path, postgres):
    made = servers(tmp_path, postgres, None, 2, latency="15ms")
    chance = random.Random(11)
    with made[0], made[1]:
        wanted, seen = {}, {}
        with made[0].client() as client:
            for k in range(3):
                names = [f"{k}-{n}" for n in range(600)]
                wanted[start_batch(client, [line(name) for name in names]).id] = names
        for turn in range(20):
            time.sleep(chance.uniform(0.05, 0.4))  # a random moment is the point
            made[turn % 2].kill()
            made[turn % 2].start()
            with made[turn % 2].client() as client:
                for batch_id in wanted:
                    batch = client.batches.retrieve(batch_id)
                    counts = batch.request_counts
                    assert (
                        counts.completed + counts.failed + counts.never_ran <= counts.total
                        or not counts.total
                    )
                    assert seen.get(batch_id) not in ENDED or seen[batch_id] == batch.status
                    seen[batch_id] = batch.status
        with made[0].client() as client:
            for batch_id, names in wanted.items():
                checked(client, batch_id, names)


def test_what_one_server_is_told_the_others_heed(tmp_path, postgres):
    one, two = servers(tmp_path, postgres, None, latency="30ms")
    with one, two, one.client() as client, two.client() as other:
        names = [f"r{n}" for n in range(2000)]
        batch = start_batch(client, [line(name) for name in names])
        while client.batches.retrieve(batch.id).request_counts.completed < 20:
            pass
        other.post(f"/batches/{batch.id}/pause", cast_to=dict)
        paused_at = time.monotonic()
        before = -1
        # Both stop within about a second; then nothing moves.
        while (now := sum(len(log_of(tmp_path / f"calls{n}")) for n in range(2))) != before:
            before = now
            time.sleep(0.3)  # long enough for ten dispatches, if there were any
        assert time.monotonic() - paused_at < 5
        other.post(f"/batches/{batch.id}/requests/cancel", cast_to=dict, body={"custom_id_prefix": "r1"})
        client.post(f"/batches/{batch.id}/resume", cast_to=dict)
        other.batches.cancel(batch.id)
        _, _, failed = checked(client, batch.id, names, "cancelled")
        codes = {(one["error"] or {}).get("code") for one in failed}
        assert codes <= {"batch_cancelled", "request_cancelled"}


def test_a_repeat_on_another_server_makes_no_second_batch(tmp_path, postgres):
    one, two = servers(tmp_path, postgres, None)
    with one, two, one.client() as client, two.client() as other:
        requests = [{"custom_id": "a", "body": line("a")["body"]}]
        wanted = {"endpoint": "/v1/chat/completions", "completion_window": "1h", "requests": requests}
        once = {"headers": {"Idempotency-Key": "mine"}}
        made = [each.post("/batches", cast_to=dict, body=wanted, options=once) for each in (client, other)]
        assert made[0]["id"] == made[1]["id"]
        assert len(list(other.batches.list())) == 1


def test_the_database_may_be_gone_for_a_while(tmp_path, postgres):
    (one,) = servers(tmp_path, postgres, None, 1, latency="10ms")
    with one, one.client() as client:
        names = [f"r{n}" for n in range(1500)]
        batch = start_batch(client, [line(name) for name in names])
        while client.batches.retrieve(batch.id).request_counts.completed < 50:
            pass
        postgres.stop()
        try:
            for _ in range(3):
                with pytest.raises(openai.InternalServerError) as caught:
                    client.batches.retrieve(batch.id)
                assert (caught.value.status_code, caught.value.code) == (503, "store_failed")
                assert "retry-after" in caught.value.response.headers
        finally:
            postgres.start()
        checked(client, batch.id, names)
