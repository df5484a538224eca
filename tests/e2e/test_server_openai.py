"""The server as the real OpenAI SDK meets it, over a real socket."""

import asyncio
import base64

import httpx
import openai
import pytest
from served import Server, ids, jsonl, line, results, start_batch, until, upload


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request, tmp_path_factory):
    store = []
    if request.param == "postgres":
        store = ["--database", request.getfixturevalue("postgres").new_database()]
    with Server(tmp_path_factory.mktemp("server"), "--engine", "echo:latency=2ms", *store) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


# -- files -----------------------------------------------------------------------------------------


def test_a_file_goes_in_and_comes_out_and_is_forgotten(client):
    data = jsonl([line("a")])
    made = client.files.create(file=("mine.jsonl", data), purpose="batch")
    assert (made.object, made.filename, made.bytes, made.purpose, made.status) == (
        "file", "mine.jsonl", len(data), "batch", "processed",
    )  # fmt: skip
    assert made.expires_at - made.created_at == 30 * 86_400
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    assert made.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert caught.value.param == "id"
    assert caught.value.request_id.startswith("req_")


def test_expiry_and_purpose_are_taken_and_checked(client):
    made = client.files.create(
        file=("mine.jsonl", jsonl([line("a")])),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert made.expires_at - made.created_at == 3600
    kept = client.files.create(file=("notes.txt", b"anything"), purpose="user_data")
    assert kept.expires_at is None
    for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "last_used", "seconds": 3600}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch", expires_after=wrong)
        assert caught.value.param.startswith("expires_after")
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a.jsonl", b"{}\n"), purpose="nonsense")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "purpose")
    for name, data in (("a.txt", b"{}\n"), ("a.jsonl", b""), ("a.jsonl", b"\x89PNG")):
        with pytest.raises(openai.BadRequestError, match="jsonl"):
            client.files.create(file=(name, data), purpose="batch")


def test_form_parts_come_in_any_order_and_ranges_are_served(server):
    data = jsonl([line("a")])
    parts = [("file", ("b.jsonl", data)), ("purpose", (None, "batch"))]
    made = httpx.post(f"{server.base_url}/files", files=parts).json()
    assert made["bytes"] == len(data)
    url = f"{server.base_url}/files/{made['id']}/content"
    part = httpx.get(url, headers={"range": "bytes=2-5"})
    assert (part.status_code, part.content) == (206, data[2:6])


def test_pages_follow_each_other_without_gap_or_repeat(client):
    made = [upload(client, [line("a")], f"page-{n}.jsonl").id for n in range(5)]
    listed = [one.id for one in client.files.list(limit=2, order="desc") if one.filename.startswith("page-")]
    assert listed == made[::-1]
    listed = [one.id for one in client.files.list(limit=2, order="asc") if one.filename.startswith("page-")]
    assert listed == made
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.list(after="file-nothing").data  # noqa: B018 - asks
    assert caught.value.param == "after"


# -- the life of a Batch ---------------------------------------------------------------------------


def test_a_batch_is_answered_whole(client):
    lines = [line(f"id {n} \u2028 ü", f"text {n}\u0085\u2029") for n in range(50)]
    batch = start_batch(client, lines, metadata={"team": "x"})
    assert batch.status == "validating"
    assert batch.expires_at - batch.created_at == 86_400
    batch = until(client, batch.id)
    assert batch.status == "completed"
    assert batch.model == "echo"
    assert batch.metadata == {"team": "x"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (50, 50)
    assert batch.error_file_id is None
    assert batch.errors is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    done, failed = results(client, batch)
    assert failed == []
    assert ids(done) == ids(lines)
    assert done[7]["response"]["body"]["choices"][0]["message"]["content"] == "text 7\u0085\u2029"
    used = sum(one["response"]["body"]["usage"]["completion_tokens"] for one in done)
    assert batch.usage.output_tokens == used > 0
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.expires_at is not None


def test_a_refused_input_names_every_bad_line(client):
    lines = [
        line("a"),
        line("b") | {"url": "/v1/embeddings"},
        line("a"),
        {"custom_id": "c"},
        line("d", stream=True),
    ]
    batch = until(client, start_batch(client, lines).id)
    assert batch.status == "failed"
    assert batch.output_file_id is None
    found = {(error.line, error.code) for error in batch.errors.data}
    assert {(2, "invalid_url"), (3, "duplicate_custom_id"), (5, "streaming_unsupported")} <= found
    assert any(number == 4 for number, _ in found)
    assert batch.request_counts.total == 0


def test_a_model_that_is_not_served_or_a_file_that_is_not_there_fails_the_batch(client):
    batch = until(client, start_batch(client, [line("a", model="gpt-9")]).id)
    assert (batch.status, batch.errors.data[0].code, batch.errors.data[0].line) == (
        "failed",
        "model_not_found",
        1,
    )
    batch = client.batches.create(
        input_file_id="file-nothing", endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = until(client, batch.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_request")


def test_what_cannot_be_created_is_refused_by_name(client):
    file_id = upload(client, [line("a")]).id
    good = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    wrong = [
        ({"endpoint": "/v1/x"}, "invalid_value", "endpoint"),
        ({"completion_window": "30s"}, "invalid_value", "completion_window"),
        ({"completion_window": "8d"}, "invalid_value", "completion_window"),
        ({"metadata": {"a": ["b"]}}, "invalid_type", "metadata.a"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "object_above_max_properties", "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "property_name_above_max_length", "metadata"),
        ({"metadata": {"k": "x" * 513}}, "string_above_max_length", "metadata.k"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "invalid_value",
            "output_expires_after.seconds",
        ),
    ]
    for change, code, param in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**good | change)
        assert (caught.value.code, caught.value.param) == (code, param)
    for name in good:
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/batches", cast_to=object, body={key: good[key] for key in good if key != name})
        assert (caught.value.code, caught.value.param) == ("missing_required_parameter", name)
    assert until(client, client.batches.create(**good | {"completion_window": "7d"}).id).status == "completed"


def test_a_repeat_with_the_same_key_makes_no_second_batch(client):
    wanted = {
        "input_file_id": upload(client, [line("a")]).id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": "once"},
    }
    first, second = client.batches.create(**wanted), client.batches.create(**wanted)
    assert first.id == second.id
    with pytest.raises(openai.ConflictError) as caught:
        client.with_options(max_retries=2).batches.create(**wanted | {"completion_window": "12h"})
    assert caught.value.code == "idempotency_conflict"


def test_deleting_the_input_does_not_stop_its_batch(client):
    file = upload(client, [line(str(n)) for n in range(200)])
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    client.files.delete(file.id)
    batch = until(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 200)


def test_lists_are_paged_and_filtered(client):
    made = [start_batch(client, [line("a")]).id for _ in range(3)]
    for one in made:
        until(client, one)
    listed = [one.id for one in client.batches.list(limit=2)]
    assert [one for one in listed if one in made] == made[::-1]
    assert len(listed) == len(set(listed))
    failed = client.get("/batches?status=failed,expired", cast_to=dict)
    assert {one["status"] for one in failed["data"]} <= {"failed", "expired"}
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_nothing")
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=101)


# -- live ------------------------------------------------------------------------------------------


def test_live_endpoints_answer_and_stream(client):
    asked = {"model": "echo", "messages": [{"role": "user", "content": "a b c"}]}
    assert client.chat.completions.create(**asked).choices[0].message.content == "a b c"
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == "a b c"
    assert len(pieces) > 2
    assert client.completions.create(model="echo", prompt="x y").choices[0].text
    assert len(client.embeddings.create(model="echo", input=["a", "b"]).data) == 2
    assert client.responses.create(model="echo", input="hello").output_text == "hello"
    kinds = [event.type for event in client.responses.create(model="echo", input="hello", stream=True)]
    assert kinds[-1] == "response.completed"
    assert [one.id for one in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"


def test_a_live_request_at_fault_is_told_so(client, server):
    good = [{"role": "user", "content": "a"}]
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=good)
    assert caught.value.code == "model_not_found"
    for body, param in (({"messages": good}, "model"), ({"model": "echo"}, "messages")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/chat/completions", cast_to=object, body=body)
        assert (caught.value.code, caught.value.param) == ("missing_required_parameter", param)
    nested = b'{"model":"echo","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for raw in (
        b"",
        b"[]",
        b"{",
        b'"x"',
        b"\xff",
        b'{"model": NaN}',
        nested,
        b'{"model":"\\ud800","messages":[]}',
    ):
        answer = httpx.post(f"{server.base_url}/chat/completions", content=raw)
        assert answer.status_code in {400, 404}, raw[:40]
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_wrong_paths_methods_and_forms_get_the_envelope(server):
    url = server.base_url
    found = [
        (httpx.get(f"{url}/nothing"), 404),
        (httpx.put(f"{url}/files"), 405),
        (httpx.post(f"{url}/files", content=b"x"), 400),
        (httpx.post(f"{url}/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400),
        (
            httpx.post(
                f"{url}/files",
                content=b"--b\r\nx",
                headers={"content-type": "multipart/form-data; boundary=b"},
            ),
            400,
        ),
        (httpx.post(f"{url}/files", files={"purpose": (None, "batch")}), 400),
        (httpx.post(f"{url}/files", files=[("file", ("../../etc/x.jsonl", b"{}\n"))]), 400),
        (httpx.get(f"{url}/files/..%2f..%2fstate.db/content"), 404),
        (httpx.get(f"{url}/files/%00"), 400),
        (httpx.get(f"{url}/files?limit=0"), 400),
        (httpx.get(f"{url}/files?limit=ten"), 400),
        (httpx.get(f"{url}/batches?status=odd"), 400),
        (httpx.get(f"{url}/models", headers={"x-long": "y" * 70_000}), 431),
        (httpx.post(f"{url}/batches", json=dict.fromkeys(["input_file_id", "endpoint"], "x" * 600)), 400),
        (httpx.post(f"{url}/batches", content=b"{}" + b" " * (65 << 20)), 413),
    ]
    for answer, status in found:
        assert answer.status_code == status, answer.request.url
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    named = httpx.post(
        f"{url}/files",
        files=[("purpose", (None, "batch")), ("file", ("../../etc/x.jsonl", jsonl([line("a")])))],
    ).json()
    # A name is only a name: nothing on the disk is called so.
    assert named["filename"] == "../../etc/x.jsonl"


def test_embeddings_batches_work_too(client):
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings",
         "body": {"model": "echo", "input": f"text {n}", "encoding_format": "base64"}}
        for n in range(5)
    ]  # fmt: skip
    batch = until(client, start_batch(client, lines, endpoint="/v1/embeddings").id)
    done, _ = results(client, batch)
    assert base64.b64decode(done[0]["response"]["body"]["data"][0]["embedding"])


def test_health_is_told_without_a_key(server):
    root = server.base_url.removesuffix("/v1")
    assert httpx.get(f"{root}/healthz").json()["status"] == "ok"
    assert httpx.get(f"{root}/readyz").status_code == 200


def test_a_hundred_small_uploads_and_creates_at_once_are_all_taken(server, client):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as many:

            async def one(number):
                file = await many.files.create(file=("a.jsonl", jsonl([line(str(number))])), purpose="batch")
                return await many.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )

            return await asyncio.gather(*(one(number) for number in range(100)))

    made = asyncio.run(main())
    assert len({one.id for one in made}) == 100
    assert {until(client, one.id).status for one in made} == {"completed"}
