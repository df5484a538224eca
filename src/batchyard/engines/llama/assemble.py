"""Floor 3. From streamed chunks to the answer that a call without streaming would have brought. Pure.

The engine always streams from llama.cpp, since only then a cancel frees the slot at once; a Batch still
wants one body.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from batchyard.types import Endpoint, Usage

_decode = msgspec.json.Decoder().decode
_TEXTS = ("content", "reasoning_content", "refusal")


class NoAnswer(Exception):  # noqa: N818 - names what happened
    """The chunks do not make an answer: the stream broke off, or told of an error.

    Args:
        error: the error object inside the stream, where there was one.
    """

    def __init__(self, message: str, error: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.error = error


def assemble(endpoint: Endpoint, chunks: Iterable[bytes], model: str) -> tuple[bytes, Usage]:
    """The body of an answer, and what it took.

    Raises:
        NoAnswer: the stream is not whole.
    """
    try:
        decoded = [_decode(chunk) for chunk in chunks]
    except msgspec.MsgspecError as error:
        raise NoAnswer("a chunk of the stream is no JSON") from error
    for chunk in decoded:
        if isinstance(chunk.get("error"), dict) and "choices" not in chunk:
            raise NoAnswer(str(chunk["error"].get("message")), chunk["error"])
    if endpoint is Endpoint.RESPONSES:
        return _response(decoded, model)
    body = _completion(endpoint, decoded, model)
    return msgspec.json.encode(body), _usage(body["usage"])


def _completion(endpoint: Endpoint, chunks: list[dict[str, Any]], model: str) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] | None = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk.get("choices", ()):
            choice = choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None})
            if endpoint is Endpoint.CHAT:
                _add_delta(
                    choice.setdefault("message", {"role": "assistant", "content": None}), part["delta"]
                )
            else:
                choice["text"] = choice.get("text", "") + (part.get("text") or "")
            _add_logprobs(choice, part.get("logprobs"))
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    if not choices or usage is None or any(one["finish_reason"] is None for one in choices.values()):
        raise NoAnswer("the stream ended before the answer was whole")
    for choice in choices.values():
        choice.setdefault("logprobs", None)
    first = chunks[0]
    return {
        "id": first.get("id"),
        "object": "chat.completion" if endpoint is Endpoint.CHAT else "text_completion",
        "created": first.get("created"),
        "model": model,
        "system_fingerprint": first.get("system_fingerprint"),
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usage,
    }


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in _TEXTS:
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= part["index"]:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[part["index"]]
        call["id"] = part.get("id") or call["id"]
        for name, text in (part.get("function") or {}).items():
            call["function"][name] += text or ""


def _add_logprobs(choice: dict[str, Any], part: dict[str, Any] | None) -> None:
    if part is None:
        return
    known = choice.setdefault("logprobs", {})
    for name, values in part.items():
        if isinstance(values, list):
            known.setdefault(name, []).extend(values)
        else:
            known[name] = values


def _response(chunks: list[dict[str, Any]], model: str) -> tuple[bytes, Usage]:
    for chunk in reversed(chunks):
        if chunk.get("type") in {"response.completed", "response.incomplete"}:
            body = {**chunk["response"], "model": model}
            return msgspec.json.encode(body), _usage(body.get("usage") or {})
    raise NoAnswer("the stream ended before the answer was whole")


def _usage(found: dict[str, Any]) -> Usage:
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    return Usage(
        found.get("prompt_tokens", found.get("input_tokens", 0)),
        found.get("completion_tokens", found.get("output_tokens", 0)),
        details.get("cached_tokens", 0),
    )
