"""Messages as the real Anthropic SDK meets them, over a real socket; the model behind speaks OpenAI."""

import anthropic
import httpx
import pytest
from served import Server

WORDS = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server"), "--engine", "echo") as server:
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
