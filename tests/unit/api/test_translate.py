"""Anthropic messages and chat completions, there and back: tools and their streams above all."""

import json

import pytest

from batchyard.api.anthropic.translate import StreamTranslator, to_chat, to_message, to_usage
from batchyard.api.errors import ApiError

BASE = {"model": "m", "max_tokens": 9}


def test_roles_blocks_and_tool_results_become_turns_in_order():
    chat = to_chat(
        BASE
        | {
            "system": "Be brief.",
            "stop_sequences": ["END"],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "Let me look."},
                        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "blue"}],
                        },
                        {"type": "text", "text": "and now?"},
                    ],
                },
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "look"},
        }
    )
    assert [turn["role"] for turn in chat["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert chat["messages"][2]["content"] == "Let me look."
    call = chat["messages"][2]["tool_calls"][0]
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("t1", {"at": "sky"})
    assert chat["messages"][3] == {"role": "tool", "tool_call_id": "t1", "content": "blue"}
    assert chat["stop"] == ["END"]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert chat["tools"][0]["function"]["parameters"] == {"type": "object"}


def test_an_answer_with_tools_becomes_blocks_and_its_reason_is_translated():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    completion = {
        "choices": [
            {"message": {"content": "Looking.", "tool_calls": [call]}, "finish_reason": "tool_calls"}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}},
    }
    message = to_message(completion, "msg_1", "m")
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert message["content"][1]["input"] == {"at": "sky"}
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == 4
    assert message["usage"]["cache_read_input_tokens"] == 6
    assert to_usage({})["output_tokens"] == 0


def test_a_stream_opens_and_closes_its_blocks_one_after_the_other():
    translator = StreamTranslator("msg_1", "m")

    def chunk(delta, reason=None):
        return {"choices": [{"delta": delta, "finish_reason": reason}]}

    def tool(index, **function):
        return {"index": index, "id": f"c{index}", "function": function}

    chunks = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Look"}),
        chunk({"content": "ing."}),
        chunk({"tool_calls": [tool(0, name="look", arguments="")]}),
        chunk({"tool_calls": [tool(0, arguments='{"at":')]}),
        chunk({"tool_calls": [tool(0, arguments='"sky"}')]}),
        chunk({"tool_calls": [tool(1, name="wait", arguments="{}")]}),
        chunk({}, "tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
    ]
    events = [event for one in chunks for event in translator.feed(one)] + list(translator.finish())
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 4 + [2] * 3
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools.0"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": 3}, "tools"),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "a"}], "tool_choice": 3},
            "tool_choice",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "system": 3}, "system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": 3}]}]},
            "messages.0.content.0.source",
        ),
    ],
)
def test_whatever_is_wrong_is_an_error_that_names_it(change, param):
    with pytest.raises(ApiError) as caught:
        to_chat(BASE | change)
    assert caught.value.param == param
