"""Floor 8. Between Anthropic messages and OpenAI chat completions: text, images, tools, both ways.

Pure. Formats as the SDK of Anthropic (2.15) and of OpenAI (3.57) define them. What chat completions cannot
say (thinking, citations, documents) is refused by name rather than dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from batchyard.api.bodies import kind_of
from batchyard.api.errors import ApiError

#: Parameters that mean the same in both.
_SAME = ("temperature", "top_p", "top_k")
#: Parameters that change nothing here and may be left out.
_IGNORED = {"metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id"}
_KNOWN = {
    "model", "messages", "max_tokens", "system", "stop_sequences", "stream", "tools", "tool_choice",
    *_SAME, *_IGNORED,
}  # fmt: skip
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def to_chat(params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks the same as *params*, a body of `POST /v1/messages`.

    Raises:
        ApiError: *params* are wrong, or ask for what cannot be translated.
    """
    for name in params:
        if name not in _KNOWN:
            raise _wrong(name, "this server cannot honour it; leave it out")
    model = params.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model", "Field required: the name of a model")
    most = params.get("max_tokens")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise _wrong("max_tokens", "Field required: an integer of 1 or more")
    chat: dict[str, Any] = {"model": model, "max_tokens": most}
    chat |= {name: params[name] for name in _SAME if params.get(name) is not None}
    messages = params.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "Field required: an array with at least one message")
    turns: list[dict[str, Any]] = []
    if params.get("system"):
        turns.append({"role": "system", "content": _system(params["system"])})
    for place, message in enumerate(messages):
        turns += _turns(message, f"messages.{place}")
    chat["messages"] = turns
    if params.get("stop_sequences"):
        chat["stop"] = params["stop_sequences"]
    if params.get("tools"):
        if not isinstance(params["tools"], list):
            raise _wrong("tools", f"Input should be an array of tools, not {kind_of(params['tools'])}")
        chat["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(params["tools"])]
        chat |= _tool_choice(params.get("tool_choice"))
    if params.get("stream"):
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    return chat


def to_message(completion: Mapping[str, Any], message_id: str, model: str) -> dict[str, Any]:
    """The Anthropic message that says the same as a chat *completion*."""
    choice = completion["choices"][0]
    said = choice["message"]
    content: list[dict[str, Any]] = []
    if said.get("content"):
        content.append({"type": "text", "text": said["content"], "citations": None})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        used = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function)}
        content.append(used)
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _STOP_REASONS.get(choice.get("finish_reason") or "stop", "end_turn"),
        "stop_sequence": None,
        "usage": to_usage(completion.get("usage") or {}),
    }


def to_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Token counts under Anthropic's names: cached prompt tokens are counted apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (usage.get("prompt_tokens") or 0) - cached),
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


class StreamTranslator:
    """Turns the chunks of a streamed chat completion into the events of a streamed message.

    `feed` each chunk, then `finish`; both give events in order. Blocks are opened when their first piece
    comes and closed before the next is opened, as the SDK's accumulator expects.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._started = False
        self._index = -1
        self._open: str | int | None = None
        self._stop = "end_turn"
        self._usage: dict[str, Any] = to_usage({})

    def feed(self, chunk: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        """The events that *chunk* brings."""
        yield from self._start()
        if chunk.get("usage"):
            self._usage = to_usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content"):
                yield from self._switch("text", {"type": "text", "text": "", "citations": None})
                yield self._delta({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                yield from self._tool_piece(call)
            if choice.get("finish_reason"):
                self._stop = _STOP_REASONS.get(choice["finish_reason"], "end_turn")

    def finish(self) -> Iterable[dict[str, Any]]:
        """The last events."""
        yield from self._start()
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop, "stop_sequence": None},
            "usage": self._usage,
        }
        yield {"type": "message_stop"}

    def _start(self) -> Iterable[dict[str, Any]]:
        if self._started:
            return
        self._started = True
        empty: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": to_usage({}),
        }
        yield {"type": "message_start", "message": empty}

    def _tool_piece(self, call: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        function = call.get("function") or {}
        number = call.get("index", 0)
        if self._open != number:
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": call.get("id") or f"toolu_{number}",
                "input": {},
            }
            yield from self._switch(number, block | {"name": function.get("name") or ""})
        if function.get("arguments"):
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _switch(self, to: str | int, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if self._open == to:
            return
        yield from self._close()
        self._open = to
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _wrong(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: {what}", param=param)


def _system(system: Any) -> str:
    if isinstance(system, str):
        return system
    if not isinstance(system, list):
        raise _wrong("system", f"Input should be a string or an array of text blocks, not {kind_of(system)}")
    return "\n\n".join(_text(block, f"system.{place}") for place, block in enumerate(system))


def _text(block: Any, at: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise _wrong(at, "Input should be a text block")
    text: str = block["text"]
    return text


def _turns(message: Any, at: str) -> list[dict[str, Any]]:
    """A message as chat turns: results of tools become turns of their own."""
    if not isinstance(message, dict):
        raise _wrong(at, f"Input should be an object, not {kind_of(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in {"user", "assistant", "system"}:
        raise _wrong(f"{at}.role", "Input should be 'user' or 'assistant'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise _wrong(f"{at}.content", "Input should be a string or an array of content blocks")
    turns: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(content):
        here = f"{at}.content.{place}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": _text(block, here)})
        elif kind == "image" and role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _image(block, here)}})
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _result(block, here),
            }
            turns.append(result)
        else:
            raise _wrong(here, f"a block of type {kind!r} cannot be translated from the role {role!r}")
    if parts or calls:
        texts_only = all(part["type"] == "text" for part in parts)
        joined: Any = "".join(part["text"] for part in parts) if texts_only else parts
        turn: dict[str, Any] = {"role": role, "content": joined or None}
        if calls:
            turn["tool_calls"] = calls
        turns.append(turn)
    return turns


def _image(block: dict[str, Any], at: str) -> str:
    source = block.get("source")
    if not isinstance(source, dict):
        source = {}
    if source.get("type") == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
    raise _wrong(f"{at}.source", "Input should be a base64 or url source")


def _result(block: dict[str, Any], at: str) -> str:
    content = block.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{at}.content", "Input should be a string or an array of text blocks")
    return "\n".join(_text(one, f"{at}.content.{place}") for place, one in enumerate(content))


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or not tool.get("name"):
        raise _wrong(at, "Input should be a tool with a name and an input_schema")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    simple = {"auto": "auto", "any": "required", "none": "none"}
    if kind in simple:
        found: dict[str, Any] = {"tool_choice": simple[kind]}
    elif kind == "tool" and choice.get("name"):
        found = {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    else:
        raise _wrong("tool_choice", "Input should be of type auto, any, none or tool")
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _input(function: Mapping[str, Any]) -> Any:
    try:
        return json.loads(function.get("arguments") or "{}")
    except ValueError:
        # Models do write broken JSON; the SDK wants an object, and the caller wants to see it.
        return {"arguments": function.get("arguments")}
