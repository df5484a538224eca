"""Permission is live: scopes, limits, grants and revocations count from the next dispatch and the next read."""

import json
import threading
import time

import httpx
import openai
import pytest
from served import Server, ids, line, log_of, results, start_batch, until

from batchyard.clock import SystemClock
from batchyard.service.hosting.keys import keys_of


class Keys:
    """`batchyard keys`, on the server of a test."""

    def __init__(self, run_batchyard, place):
        self._run, self._place = run_batchyard, place

    def create(self, *options, tenant="t"):
        made = self._run("keys", "create", "k", "--tenant", tenant, *options, *self._place, "--json")
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout)

    def do(self, *arguments):
        done = self._run("keys", *arguments, *self._place)
        assert done.returncode == 0, done.stderr


#: What does not depend on the store is tried on one.
on_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


@pytest.fixture
def keys(run_batchyard, place):
    return Keys(run_batchyard, place)


def slow(tmp_path, latency="10ms", at_once="4"):
    engine = f"echo:max_batch=1,latency={latency},log={tmp_path / 'calls'}"
    return Server(tmp_path, "--engine", engine, "--concurrency", at_once)


def test_a_revoked_key_stops_the_dispatches_of_its_batches_and_every_read(
    tmp_path, keys, place, record_property
):
    mine, other = keys.create(), keys.create()
    with (
        slow(tmp_path) as server,
        server.client(mine["key"]) as client,
        server.client(other["key"]) as friend,
    ):
        names = [f"r{n}" for n in range(1000)]
        batch = start_batch(client, [line(one) for one in names])
        while client.batches.retrieve(batch.id).request_counts.completed < 50:
            pass
        leaked, refused_at = [], []
        stream = threading.Thread(target=follow, args=(server, batch, mine["key"], leaked))
        stream.start()
        while not leaked:
            # It has begun, so that it is the stream that the revocation ends.
            assert stream.is_alive()
        with keys_of(tmp_path / "state", SystemClock(), place[1] if "--database" in place else None) as there:
            there.revoke(mine["id"])
        revoked_at = time.monotonic()
        while True:
            try:
                client.batches.retrieve(batch.id)
            except openai.AuthenticationError:
                refused_at.append(time.monotonic())
                break
        held = until(friend, batch.id, "paused")
        held_at = time.monotonic()
        stream.join(timeout=10)
        assert not stream.is_alive()
        assert "revoked" in held.waiting_for
        record_property("revoke_to_refuse_s", round(refused_at[0] - revoked_at, 3))
        record_property("revoke_to_hold_s", round(held_at - revoked_at, 3))
        print(
            f"\nrefused {refused_at[0] - revoked_at:.3f} s, held {held_at - revoked_at:.3f} s after the revocation"
        )
        assert refused_at[0] - revoked_at < 1.0
        assert held_at - revoked_at < 1.5
        calls = len(log_of(tmp_path / "calls"))
        assert calls < 1000
        # Nothing more goes out, and nothing more comes in by the revoked key.
        assert leaked[-1][0] == "error"
        assert leaked[-1][1]["error"]["code"] == "key_withdrawn"
        for path in (f"batches/{batch.id}/results", f"files/{batch.input_file_id}/content", "models"):
            answer = httpx.get(
                f"{server.base_url}/{path}", headers={"authorization": f"Bearer {mine['key']}"}
            )
            assert answer.status_code == 401
        until(friend, start_batch(friend, [line(f"other-{n}") for n in range(60)]).id)
        assert sum(not one.startswith("other") for one in log_of(tmp_path / "calls")) == calls
        friend.post(f"/batches/{batch.id}/resume", cast_to=dict)
        done, failed = results(friend, until(friend, batch.id))
        assert (sorted(ids(done)), failed) == (sorted(names), [])


def follow(server, batch, key, seen):
    url = f"{server.base_url}/batches/{batch.id}/results?stream=true"
    with httpx.stream("GET", url, headers={"x-api-key": key}, timeout=60) as response:
        name = None
        for row in response.iter_lines():
            kind, _, value = row.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                seen.append((name, json.loads(value)))


@on_sqlite
def test_a_withdrawn_model_holds_its_batches_and_is_not_found_any_more(tmp_path, keys):
    mine, other = keys.create("--model", "echo", "--model", "x"), keys.create()
    with (
        slow(tmp_path) as server,
        server.client(mine["key"]) as client,
        server.client(other["key"]) as friend,
    ):
        batch = start_batch(client, [line(f"r{n}") for n in range(1000)])
        while client.batches.retrieve(batch.id).request_counts.completed < 20:
            pass
        keys.do("change", mine["id"], "--model", "x")
        held = until(client, batch.id, "paused")
        assert "may not use 'echo' any more" in held.waiting_for
        assert [one.id for one in client.models.list()] == []
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="echo", messages=[])
        refused = until(client, start_batch(client, [line("a")]).id)
        assert (refused.status, refused.errors.data[0].code) == ("failed", "model_not_found")
        with pytest.raises(openai.NotFoundError):
            client.post(f"/batches/{batch.id}/amend", cast_to=dict, body={"model": "echo"})
        keys.do("change", mine["id"], "--model", "echo")
        time.sleep(0.6)  # what is believed of a key lasts half a second
        client.post(f"/batches/{batch.id}/resume", cast_to=dict)
        assert until(friend, batch.id).request_counts.completed == 1000


@on_sqlite
def test_scopes_open_some_doors_only(tmp_path, keys):
    live, reader, writer = (keys.create("--scope", one)["key"] for one in ("live", "batches:read", "batches"))
    with Server(tmp_path, "--engine", "echo") as server:
        asked = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
        with server.client(live) as client:
            assert client.chat.completions.create(**asked).choices
            assert client.models.list().data
            for call in (client.batches.list, client.files.list, lambda: start_batch(client, [line("a")])):
                with pytest.raises(openai.PermissionDeniedError) as caught:
                    call()
                assert caught.value.code == "insufficient_scope"
        with server.client(writer) as client:
            batch = until(client, start_batch(client, [line("a")]).id)
            with pytest.raises(openai.PermissionDeniedError):
                client.chat.completions.create(**asked)
            with pytest.raises(openai.PermissionDeniedError):
                client.get("/webhook_endpoints", cast_to=dict)
        with server.client(reader) as client:
            assert len(results(client, client.batches.retrieve(batch.id))[0]) == 1
            for call in (
                lambda: client.batches.cancel(batch.id),
                lambda: client.files.delete(batch.input_file_id),
                lambda: start_batch(client, [line("a")]),
            ):
                with pytest.raises(openai.PermissionDeniedError):
                    call()


@on_sqlite
def test_a_key_that_asks_too_fast_is_told_when_to_come_back(tmp_path, keys):
    fast = keys.create("--requests-per-minute", "30")
    with Server(tmp_path, "--engine", "echo") as server, server.client(fast["key"]) as client:
        for _ in range(30):
            client.models.list()

        def hurry():
            for _ in range(3):
                client.models.list()

        with pytest.raises(openai.RateLimitError) as caught:
            hurry()
        headers = caught.value.response.headers
        assert caught.value.code == "rate_limit_exceeded"
        assert 0 < float(headers["retry-after-ms"]) <= 2001
        assert 1 <= int(headers["retry-after"]) <= 120
        # The SDK's own patience is enough.
        assert client.with_options(max_retries=5).models.list().data


def test_what_is_enqueued_is_limited_and_its_room_is_given_back_once(tmp_path, keys):
    lines = [line(f"r{n}", "word " * 20) for n in range(150)]
    tokens = sum(len(json.dumps(one)) + 1 for one in lines) // 4
    mine = keys.create("--max-enqueued-tokens", str(int(tokens * 2.5)), "--max-batches", "5")
    with slow(tmp_path, "20ms", "1") as server, server.client(mine["key"]) as client:
        made = [start_batch(client, lines) for _ in range(4)]
        until(client, made[1].id, "in_progress")
        # The third waits: it is not refused.
        waiting = until(client, made[2].id, "validating")
        while not waiting.waiting_for:
            waiting = client.batches.retrieve(made[2].id)
        assert "as much as its key allows" in waiting.waiting_for
        capacity = client.get("/batchyard/capacity", cast_to=dict)
        assert (capacity["batches"], capacity["available_batches"]) == (2, 3)
        assert 0 <= capacity["available_tokens"] < tokens
        client.batches.cancel(made[0].id)
        for one in made[1:]:
            assert until(client, one.id).status == "completed"
        capacity = client.get("/batchyard/capacity", cast_to=dict)
        assert (capacity["batches"], capacity["requests"], capacity["tokens"]) == (0, 0, 0)
        assert capacity["available_tokens"] == capacity["max_enqueued_tokens"]
        never = until(client, start_batch(client, [line(str(n), "word " * 40) for n in range(400)]).id)
        assert (never.status, never.errors.data[0].code) == ("failed", "token_limit_exceeded")


def test_foreign_ids_are_not_found_on_every_path(tmp_path, keys):
    mine, other = keys.create(tenant="one"), keys.create(tenant="two")
    with Server(tmp_path, "--engine", "echo") as server, server.client(mine["key"]) as client:
        batch = until(client, start_batch(client, [line("a")]).id)
        upload = client.uploads.create(bytes=3, filename="a.jsonl", mime_type="x", purpose="batch")
        document = httpx.get(f"{server.base_url.removesuffix('/v1')}/openapi.json").json()
        stranger = {"authorization": f"Bearer {other['key']}"}
        tried = 0
        for path, methods in document["paths"].items():
            if "{id}" not in path:
                continue
            named = (
                batch.input_file_id if "/files/" in path else upload.id if "/uploads/" in path else batch.id
            )
            for method, operation in methods.items():
                body = operation.get("requestBody", {}).get("content", {})
                sent = {"json": GOOD.get(path, {})} if "application/json" in body else {}
                if "multipart/form-data" in body:
                    sent = {"files": {"data": b"x"}}
                url = server.base_url.removesuffix("/v1") + path.replace("{id}", named)
                answer = httpx.request(method, url, headers=stranger, **sent)
                assert answer.status_code == 404, (method, path, answer.text)
                tried += 1
        assert tried > 25
        assert client.batches.retrieve(batch.id).status == "completed"


GOOD = {
    "/v1/uploads/{id}/complete": {"part_ids": ["x"]},
    "/v1/batches/{id}/requests/cancel": {"custom_ids": ["a"]},
    "/v1/batches/{id}/amend": {"body": {"seed": 1}},
    "/v1/webhook_endpoints/{id}/test": {"event_type": "batch.failed"},
}
