"""The rows of the wire contract that have no test of their own elsewhere, by the real SDKs over a real socket."""

import socket
from collections import Counter
from urllib.parse import urlsplit

import anthropic
import httpx
import httpx2
import openai
import pytest
from served import Server, ids, jsonl, line, results, start_batch, until, upload


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    settings = 'public_url = "https://batch.example.com/yard"\n'
    if request.param == "postgres":
        settings += f'database = "{request.getfixturevalue("postgres").new_database()}"\n'
    (folder / "batchyard.toml").write_text(settings)
    with Server(folder, "--engine", "echo:latency=1ms,fail=bad*:400,fail=busy:429@0.05sx2") as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def counting(server, **options):
    """A client, and how many requests it has put on the wire."""
    sent = []
    http = httpx.Client(event_hooks={"request": [sent.append]})
    return openai.OpenAI(base_url=server.base_url, api_key="none", http_client=http, **options), sent


def test_a_cancel_without_a_body_is_taken_whatever_its_headers_say(server, client):
    batch = start_batch(client, [line(str(n)) for n in range(3000)])
    answer = httpx.post(
        f"{server.base_url}/batches/{batch.id}/cancel",
        headers={"content-type": "application/json", "content-length": "0"},
    )
    assert answer.status_code == 200
    assert answer.json()["status"] in {"cancelling", "cancelled"}
    assert until(client, batch.id).status == "cancelled"
    # Asked again it is no error, and nothing changes.
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_whose_every_request_fails_is_completed(client):
    batch = until(client, start_batch(client, [line(f"bad{n}") for n in range(9)]).id)
    assert (batch.status, batch.output_file_id, batch.errors) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 0, 9)
    done, failed = results(client, batch)
    assert (done, len(failed)) == ([], 9)
    for one in failed:
        assert one["error"] is None
        assert one["response"]["status_code"] == 400
        assert set(one["response"]["body"]["error"]) == {"message", "type", "param", "code"}
        assert one["id"].startswith("batch_req_")


def test_a_permanent_conflict_is_tried_once(server, client):
    batch = until(client, start_batch(client, [line("a")]).id)
    patient, sent = counting(server, max_retries=4)
    with patient, pytest.raises(openai.ConflictError) as caught:
        patient.batches.cancel(batch.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "Cannot cancel a batch with status 'completed'" in str(caught.value)
    assert len(sent) == 1


def test_a_busy_model_is_waited_for_as_it_asks(server, client):
    batch = until(client, start_batch(client, [line("busy")]).id)
    assert batch.request_counts.completed == 1
    (request,) = client.get(f"/batches/{batch.id}/requests", cast_to=dict)["data"]
    assert (request["status"], request["attempts"]) == ("succeeded", 3)


def test_lines_that_line_readers_would_break_are_read_whole(client):
    breaks = "\u2028\u2029\u0085\r\n\x0b\x0c\x1c\x1d\x1e"
    batch = until(
        client, start_batch(client, [line(f"{n}{breaks}", f"say{breaks}this") for n in range(20)]).id
    )
    content = client.files.content(batch.output_file_id)
    assert len(list(content.iter_lines())) == len(content.text.splitlines()) == 20
    done, _ = results(client, batch)
    assert done[3]["custom_id"] == f"3{breaks}"


def test_pages_hold_while_batches_are_made(client):
    made = [start_batch(client, [line("a")]).id for _ in range(6)]
    page = client.batches.list(limit=2)
    seen = [one.id for one in page.data]
    newest = [start_batch(client, [line("a")]).id for _ in range(2)]
    while page.has_next_page():
        page = page.get_next_page()
        seen += [one.id for one in page.data]
    listed = [one for one in seen if one in made]
    assert listed == made[::-1]
    assert max(Counter(seen).values()) == 1
    assert not set(newest) & set(seen)
    empty = httpx.get(f"{client.base_url}batches?after={seen[-1]}").json()
    assert (empty["data"], empty["first_id"], empty["last_id"], empty["has_more"]) == ([], None, None, False)


def test_output_files_expire_when_they_are_told_to(client):
    batch = start_batch(
        client,
        [line("a")],
        extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 7200}},
    )
    batch = until(client, batch.id)
    file = client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"
    assert file.expires_at - file.created_at == 7200
    assert file.id in {one.id for one in client.files.list(purpose="batch_output")}


def test_every_kind_of_bad_line_is_told_with_its_code_and_place(client):
    good = line("good")
    rows = [
        (b"not json", "invalid_json_line", None),
        (
            jsonl([{key: value for key, value in good.items() if key != "custom_id"}]),
            "missing_required_parameter",
            "custom_id",
        ),
        (
            jsonl([{key: value for key, value in good.items() if key != "method"}]),
            "missing_required_parameter",
            "method",
        ),
        (
            jsonl([{key: value for key, value in good.items() if key != "url"}]),
            "missing_required_parameter",
            "url",
        ),
        (
            jsonl([{key: value for key, value in good.items() if key != "body"}]),
            "missing_required_parameter",
            "body",
        ),
        (jsonl([line("u") | {"url": "/v1/embeddings"}]), "invalid_url", "url"),
        (jsonl([line("s", stream=True)]), "streaming_unsupported", "body.stream"),
        (jsonl([line("m") | {"body": {"messages": []}}]), "invalid_request", "body.model"),
        (jsonl([line("p") | {"body": {"model": "echo"}}]), "invalid_request", "body.messages"),
        (jsonl([line("o", model="other")]), "mismatched_model", "body.model"),
        (jsonl([line("good")]), "duplicate_custom_id", "custom_id"),
    ]
    data = jsonl([good]) + b"".join(row[0].rstrip(b"\n") + b"\n" for row in rows)
    batch = until(client, start_batch(client, data).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    found = {(one.line, one.code, one.param) for one in batch.errors.data}
    assert found >= {(number, code, param) for number, (_, code, param) in enumerate(rows, 2)}
    for data, code in ((b"{}\n" * 0 + b'{"custom_id": 1}\n', None), (b"\n\n{", None)):
        assert until(client, start_batch(client, data).id).status == "failed", code
    only_blank = client.files.create(file=("x.jsonl", jsonl([good])), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(
            input_file_id=only_blank.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"


def test_anthropics_client_finds_results_behind_a_proxy(server):
    here = server.base_url.removesuffix("/v1")
    host = urlsplit(here).netloc

    def through(request):
        # What a proxy for https://batch.example.com/yard does.
        if request.url.host == "batch.example.com":
            path = request.url.path.removeprefix("/yard")
            request.url = httpx2.URL(f"http://{host}{path}")
            request.headers["host"] = host

    for versions, keys in (({"anthropic-version": "2023-06-01"}, "x-api-key"), ({}, "authorization")):
        http = httpx2.Client(event_hooks={"request": [through]})
        with anthropic.Anthropic(
            base_url="https://batch.example.com/yard",
            api_key="none",
            http_client=http,
            default_headers=versions,
        ) as client:
            params = {"model": "echo", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            made = client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
            while (batch := client.messages.batches.retrieve(made.id)).processing_status != "ended":
                pass
            assert batch.results_url.startswith("https://batch.example.com/yard/v1/messages/batches/")
            (result,) = client.messages.batches.results(made.id)
            assert (result.custom_id, result.result.type) == ("a", "succeeded")
            assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
        answer = httpx.get(f"{here}/v1/messages/batches", headers={keys: "none"} | versions)
        assert answer.status_code == 200
        assert answer.headers["request-id"].startswith("req_")


def test_tokens_are_counted_by_the_model(server):
    with anthropic.Anthropic(base_url=server.base_url.removesuffix("/v1"), api_key="none") as client:
        words = [{"role": "user", "content": "one two three"}]
        assert client.messages.count_tokens(model="echo", messages=words).input_tokens >= 3
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="other", messages=words)


def test_odd_bodies_are_refused_and_cost_nothing(server, client):
    batch = start_batch(client, [line("a")])
    url = server.base_url
    zipped = b"\x1f\x8b\x08\x00" + b"\x00" * 10_000
    for path, content, headers, status in (
        ("/batches", zipped, {"content-encoding": "gzip"}, 400),
        ("/chat/completions", b'{"model": "echo", "messages": ' + b"9" * 400 + b"}", {}, 400),
        ("/chat/completions", b'{"model": "echo", "messages": [NaN]}', {}, 400),
        ("/chat/completions", b'{"model": "a", "model": "none", "messages": []}', {}, 404),
        ("/batches", b'{"metadata": {"a": "\\u0000"}}', {}, 400),
        ("/files", b"x", {"content-type": "text/plain"}, 400),
        ("/files", b"x", {"content-type": "multipart/form-data"}, 400),
        (f"/batches/{batch.id}", b'{"priority": 1e99}', {}, 400),
        (f"/batches/{batch.id}", b'{"priority": 123456789012345678901234567890}', {}, 400),
        (f"/batches/{batch.id}/amend", b"[" * 100_000, {}, 400),
    ):
        answer = httpx.post(f"{url}{path}", content=content, headers=headers)
        assert answer.status_code == status, (path, answer.text)
        assert answer.json()["error"]["message"]
    with_nul = {
        "input_file_id": "file-x",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"k\x00": "v\x00"},
    }
    made = httpx.post(f"{url}/batches", json=with_nul, headers={"idempotency-key": b"\xff"})
    assert made.status_code in {200, 400}, made.text
    named = client.files.create(file=("a\x00b.jsonl", b"{}\n"), purpose="user_data")
    assert client.files.retrieve(named.id).filename
    assert until(client, batch.id).status == "completed"


def test_a_body_that_stops_half_way_is_given_up_alone(server, client):
    parts = urlsplit(server.base_url)
    with socket.create_connection((parts.hostname, parts.port)) as half:
        half.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        )
        half.sendall(b"content-length: 1000000000\r\n\r\n--b\r\n")
        assert until(client, start_batch(client, [line("a")]).id).status == "completed"
    assert upload(client, [line("a")]).id
    assert ids([line("a")]) == ["a"]
