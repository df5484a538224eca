"""Webhooks as the real SDK verifies them: signed, tried again, never sent where they must not go."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import httpx
import openai
import pytest
from served import Server, line, start_batch, until


class Sink:
    """Somebody's endpoint: takes what comes, and answers as it is told."""

    def __init__(self):
        self.came = Queue()
        self.answers = []
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                status = sink.answers.pop(0) if sink.answers else 204
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()
                sink.came.put((self.path, dict(self.headers), body))

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def next(self):
        return self.came.get(timeout=30)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def sink():
    made = Sink()
    yield made
    made.close()


@pytest.fixture
def server(tmp_path, place):
    settings = tmp_path / "batchyard.toml"
    settings.write_text((settings.read_text() if settings.exists() else "") + "private_webhooks = true\n")
    with Server(tmp_path, "--engine", "echo:max_batch=1,latency=1ms,fail=bad*:400") as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def add(client, url, *events):
    wanted = {"name": "mine", "url": url, "event_types": list(events) or ["batch.completed"]}
    return client.post("/webhook_endpoints", cast_to=dict, body=wanted)


def test_an_event_is_signed_and_sent_until_it_is_taken(client, sink):
    sink.answers = [500, 302]
    made = add(client, sink.url)
    batch = start_batch(client, [line("a")])
    came = [sink.next() for _ in range(3)]
    assert {one[0] for one in came} == {"/hook"}
    assert len({one[1]["webhook-id"] for one in came}) == 1
    for _, headers, body in came:
        event = client.webhooks.unwrap(body.decode(), headers, secret=made["signing_secret"])
        assert (event.type, event.data.id) == ("batch.completed", batch.id)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body.decode() + " ", headers, secret=made["signing_secret"])
    assert client.batches.retrieve(batch.id).status == "completed"


def test_every_end_has_its_event(client, sink):
    kinds = ("batch.completed", "batch.failed", "batch.cancelled", "batch.paused")
    add(client, sink.url, *kinds)
    made = {
        "batch.failed": start_batch(client, b'{"no": "request"}\n'),
        "batch.completed": start_batch(client, [line("a")]),
        "batch.paused": start_batch(
            client,
            [line(f"bad{n}") for n in range(20)],
            extra_body={"canary": {"first": 3, "max_failed_share": 0.1}},
        ),
        "batch.cancelled": start_batch(client, [line(str(n)) for n in range(3000)]),
    }
    client.batches.cancel(made["batch.cancelled"].id)
    told = {}
    for _ in kinds:
        event = json.loads(sink.next()[2])
        told[event["type"]] = event["data"]["id"]
    assert told == {kind: one.id for kind, one in made.items()}
    assert sink.came.empty()


def test_endpoints_are_managed_and_a_secret_is_rotated(client, sink):
    made = add(client, sink.url, "batch.completed", "batch.failed")
    one = f"/webhook_endpoints/{made['id']}"
    assert made["signing_secret"].startswith("whsec_")
    assert made["signing_secret"].endswith(made["signing_secret_hint"])
    shown = client.get(one, cast_to=dict)
    assert "signing_secret" not in shown
    assert [each["id"] for each in client.get("/webhook_endpoints", cast_to=dict)["data"]] == [made["id"]]
    keep = {"keep_old_secret_active_for_24_hours": True}
    rotated = client.post(f"{one}/rotate_secret", cast_to=dict, body=keep)
    assert rotated["signing_secret"] != made["signing_secret"]
    tested = client.post(f"{one}/test", cast_to=dict, body={"event_type": "batch.failed"})
    assert (tested["success"], tested["status_code"]) == (True, 204)
    _, headers, body = sink.next()
    for secret in (made["signing_secret"], rotated["signing_secret"]):
        assert client.webhooks.unwrap(body.decode(), headers, secret=secret).type == "batch.failed"
    client.post(f"{one}/rotate_secret", cast_to=dict)
    client.post(f"{one}/test", cast_to=dict, body={"event_type": "batch.failed"})
    _, headers, body = sink.next()
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.decode(), headers, secret=made["signing_secret"])
    changed = client.post(one, cast_to=dict, body={"name": "other", "event_types": ["batch.expired"]})
    assert (changed["name"], changed["event_types"]) == ("other", ["batch.expired"])
    until(client, start_batch(client, [line("a")]).id)
    assert client.delete(one, cast_to=dict)["deleted"]
    with pytest.raises(openai.NotFoundError):
        client.get(one, cast_to=dict)
    assert sink.came.empty()


def test_what_cannot_be_an_endpoint_is_refused(client):
    good = {"name": "n", "url": "https://example.com/x", "event_types": ["batch.completed"]}
    for wrong, param in (
        ({"url": "ftp://example.com"}, "url"),
        ({"url": "https://user:word@example.com"}, "url"),
        ({"url": "https://"}, "url"),
        ({"url": "https://example.com:99999"}, "url"),
        ({"event_types": ["batch.odd"]}, "event_types.0"),
        ({"event_types": []}, "event_types"),
        ({"name": 3}, "name"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/webhook_endpoints", cast_to=dict, body=good | wrong)
        assert caught.value.param == param


def test_private_addresses_are_refused_unless_allowed(tmp_path, sink):
    with Server(tmp_path, "--engine", "echo") as server, server.client() as client:
        for url in (
            "http://example.com/x",
            "https://127.0.0.1/x",
            "https://10.1.2.3/x",
            "https://[::1]/x",
            "https://[::ffff:192.168.0.1]/x",
            "https://169.254.169.254/latest/meta-data",
            "https://localhost/x",
            "https://database.internal/x",
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                add(client, url)
            assert caught.value.code == "invalid_url"
        # A name that leads to this machine after all is found out when it is sent to.
        name = httpx.URL(sink.url).copy_with(scheme="https", host="localhost.localdomain")
        made = add(client, str(name))
        tested = client.post(
            f"/webhook_endpoints/{made['id']}/test", cast_to=dict, body={"event_type": "batch.completed"}
        )
        assert not tested["success"]
        assert sink.came.empty()
