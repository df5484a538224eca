"""Messages as the real Anthropic SDK meets them, over a real socket; the model behind speaks OpenAI."""

import time
from collections import Counter
from datetime import timedelta

import anthropic
import httpx
import openai
import pytest
from served import Server

WORDS = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request, tmp_path_factory):
    store = []
    if request.param == "postgres":
        store = ["--database", request.getfixturevalue("postgres").new_database()]
    with Server(tmp_path_factory.mktemp("server"), "--engine", "echo", *store) as server:
        yield server


@pytest.fixture
def client(server):
    with anthropic.Anthropic(
        base_url=server.base_url.removesuffix("/v1"), api_key="none", max_retries=0
    ) as client:
        yield client


def test_a_message_is_answered(client):
    message = client.messages.create(model="echo", max_tokens=64, messages=WORDS)
    assert (message.type, message.role, message.model) == ("message", "assistant", "echo")
    assert message.content[0].text == "one two three"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    assert message.id.startswith("msg_")
    assert message._request_id.startswith("req_")


def test_a_message_is_streamed_piece_by_piece(client):
    with client.messages.stream(model="echo", max_tokens=64, messages=WORDS) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == "one two three"
    assert len(pieces) > 1
    assert message.content[0].text == "one two three"
    assert message.stop_reason == "end_turn"


def test_whole_conversations_with_system_images_and_tools_are_taken(client):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    message = client.messages.create(
        model="echo",
        max_tokens=64,
        system=[{"type": "text", "text": "Be brief."}],
        stop_sequences=["END"],
        extra_body={"temperature": 0.5},
        tools=[{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "See"}, image]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a cat"}]},
            {"role": "user", "content": "last words"},
        ],
    )
    assert message.content[0].text == "last words"


def test_what_is_wrong_is_told_by_name_in_its_own_envelope(client, server):
    good = {"model": "echo", "max_tokens": 8, "messages": WORDS}
    wrong = [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ]
    for change, param in wrong:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**good | change)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.body["error"]["message"].startswith(param)
        assert caught.value.request_id.startswith("req_")
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**good | {"model": "claude-9"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    answer = httpx.post(f"{server.base_url}/messages", content=b"{")
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


# -- message batches -------------------------------------------------------------------------------


def asked(custom_id, content="hello", model="echo", **more):
    params = {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "params": params | more}


def until_ended(client, batch_id):
    ends = time.monotonic() + 60
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        counts = batch.request_counts
        # All but `processing` stay zero until the end.
        assert counts.succeeded == counts.errored == counts.canceled == counts.expired == 0
        assert time.monotonic() < ends
    return batch


def test_a_message_batch_is_answered_and_read_by_the_sdk(client):
    made = client.messages.batches.create(
        requests=[asked("a", "one"), asked("b", "two"), asked("c", model="claude-9")]
    )
    assert made.id.startswith("msgbatch_")
    assert (made.processing_status, made.results_url) == ("in_progress", None)
    assert made.request_counts.processing == 3
    assert made.expires_at - made.created_at == timedelta(days=1)
    batch = until_ended(client, made.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled) == (0, 2, 1, 0)
    found = {one.custom_id: one.result for one in client.messages.batches.results(made.id)}
    assert found["b"].message.content[0].text == "two"
    # A model that is not served fails its own request, not the batch.
    assert found["c"].error.error.type == "not_found_error"
    assert client.messages.batches.delete(made.id).id == made.id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(made.id)


def test_message_batches_are_listed_both_ways(client):
    made = [client.messages.batches.create(requests=[asked("a")]).id for _ in range(5)]
    listed = [one.id for one in client.messages.batches.list(limit=2)]
    assert [one for one in listed if one in made] == made[::-1]
    back = client.messages.batches.list(limit=2, before_id=made[0])
    assert [one.id for one in back.data] == [made[2], made[1]]
    assert back.has_more


def test_a_cancelled_message_batch_says_so_for_each_request(tmp_path):
    with Server(tmp_path, "--engine", "echo:max_batch=1,latency=20ms", "--concurrency", "2") as server:
        with anthropic.Anthropic(base_url=server.base_url.removesuffix("/v1"), api_key="x") as client:
            made = client.messages.batches.create(requests=[asked(f"r{n}") for n in range(300)])
            assert client.messages.batches.cancel(made.id).processing_status in {"canceling", "ended"}
            batch = until_ended(client, made.id)
            kinds = Counter(one.result.type for one in client.messages.batches.results(made.id))
        # Through the other dialect it is not there.
        with server.client() as other:
            assert list(other.batches.list()) == []
            with pytest.raises(openai.NotFoundError):
                other.batches.retrieve(made.id)
    assert batch.cancel_initiated_at is not None
    assert kinds["canceled"] == batch.request_counts.canceled > 0
    assert sum(kinds.values()) == 300


def test_a_message_batch_that_cannot_be_is_refused_by_place(client):
    wrong = [
        ([], "requests"),
        ([asked("a"), asked("a")], "requests.1.custom_id"),
        ([asked("a" * 65)], "requests.0.custom_id"),
        ([asked("a", max_tokens=0)], "requests.0.params.max_tokens"),
        ([asked("a", stream=True)], "requests.0.params.stream"),
    ]
    for requests, place in wrong:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.batches.create(requests=requests)
        assert caught.value.body["error"]["message"].startswith(place)
