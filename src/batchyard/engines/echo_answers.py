"""Floor 3. Answers that repeat the prompt, in the OpenAI shape of each endpoint.

Deterministic: the same body gives the same bytes. A token is a word, that is, what whitespace
separates; token ids count one each. Knows nothing of engines, time or faults.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from json.encoder import encode_basestring_ascii as quote

import msgspec

from batchyard.types import Answer, Endpoint, Request, Usage

#: Length of an embedding where the request asks for none.
DIMENSIONS = 8
_MAX_DIMENSIONS = 4096
#: Fixed, so that two runs write the same bytes: 2024-01-01T00:00:00Z.
_CREATED = 1_704_067_200
_PIECES = re.compile(r"\S+\s*|\s+")


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Streaming(msgspec.Struct):
    include_usage: bool = False


class _Chat(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _Streaming | None = None


class _Completion(msgspec.Struct):
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    stream_options: _Streaming | None = None


class _Response(msgspec.Struct):
    input: str | list[_Message]
    instructions: str | None = None
    max_output_tokens: int | None = None


class _Embedding(msgspec.Struct):
    input: str | list[str | int | list[int]]
    encoding_format: str = "float"
    dimensions: int | None = None


_chat = msgspec.json.Decoder(_Chat).decode
_completion = msgspec.json.Decoder(_Completion).decode
_response = msgspec.json.Decoder(_Response).decode
_embedding = msgspec.json.Decoder(_Embedding).decode

#: One value for each pair of counts: a Batch of a million repeats few of them.
_usage = lru_cache(maxsize=4096)(Usage)


def error_body(message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    """The OpenAI error envelope."""
    shown_code = "null" if code is None else quote(code)
    envelope = (
        f'{{"error":{{"message":{quote(message)},"type":{quote(kind)},"param":null,"code":{shown_code}}}}}'
    )
    return envelope.encode("ascii")


def answer(request: Request) -> Answer:
    """The whole answer to *request*; a 400 where its body is not what the endpoint takes."""
    endpoint = request.endpoint
    try:
        # Hashing an enum member runs Python code; the most frequent endpoint goes round it.
        if endpoint is Endpoint.CHAT:
            return _answer_chat(request)
        return _ANSWERS[endpoint](request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return Answer(400, error_body(f"The body does not fit {endpoint}: {error}"))


def count_tokens(request: Request) -> int | None:
    """Prompt tokens of *request*; None where its body cannot be read."""
    reply = answer(request)
    return reply.usage.input_tokens if reply.succeeded else None


def chunks(request: Request) -> Iterator[bytes]:
    """The answer as the JSON chunks of a stream; their text joined is the text of `answer`."""
    whole = answer(request)
    if not whole.succeeded or request.endpoint is Endpoint.EMBEDDINGS:
        yield whole.body
        return
    yield from _CHUNKS[request.endpoint](request, whole.usage)


# --- chat ---------------------------------------------------------------------------------------------


def _answer_chat(request: Request) -> Answer:
    body = _chat(request.body)
    text, usage, finish = _chat_text(body)
    return Answer(
        200,
        b'{"id":"chatcmpl-%d","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,'
        b'"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":null,"finish_reason":"%b"}],'
        b'"usage":%b}'
        % (request.index, _CREATED, _model(request.model), quote(text).encode(), finish, _chat_usage(usage)),
        usage,
    )


def _chat_text(body: _Chat) -> tuple[str, Usage, bytes]:
    messages = body.messages
    if not messages:
        raise ValueError("messages is empty")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    before = 0
    if len(messages) > 1:
        before = sum(len(_text_of(message.content).split()) for message in messages[:-1])
    return _echo(_text_of(messages[-1].content), before, limit)


def _chunks_chat(request: Request, usage: Usage) -> Iterator[bytes]:
    body = _chat(request.body)
    text, _, finish = _chat_text(body)
    head = b'{"id":"chatcmpl-%d","object":"chat.completion.chunk","created":%d,"model":%b,' % (
        request.index,
        _CREATED,
        _model(request.model),
    )
    choice = b'"choices":[{"index":0,"delta":%b,"finish_reason":%b}]}'
    yield head + choice % (b'{"role":"assistant","content":""}', b"null")
    for piece in _PIECES.findall(text):
        yield head + choice % (b'{"content":%b}' % quote(piece).encode(), b"null")
    yield head + choice % (b"{}", b'"%b"' % finish)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield head + b'"choices":[],"usage":%b}' % _chat_usage(usage)


# --- completions --------------------------------------------------------------------------------------


def _answer_completion(request: Request) -> Answer:
    body = _completion(request.body)
    prompts = [_text_of_prompt(one) for one in _prompts(body.prompt)]
    choices, used_in, used_out = [], 0, 0
    for index, prompt in enumerate(prompts):
        text, usage, finish = _echo(prompt, 0, body.max_tokens)
        used_in += usage.input_tokens
        used_out += usage.output_tokens
        choices.append(
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":"%b"}'
            % (index, quote(text).encode(), finish)
        )
    usage = _usage(used_in, used_out)
    return Answer(
        200,
        b'{"id":"cmpl-%d","object":"text_completion","created":%d,"model":%b,"choices":[%b],"usage":%b}'
        % (request.index, _CREATED, _model(request.model), b",".join(choices), _chat_usage(usage)),
        usage,
    )


def _chunks_completion(request: Request, usage: Usage) -> Iterator[bytes]:
    body = _completion(request.body)
    head = b'{"id":"cmpl-%d","object":"text_completion","created":%d,"model":%b,' % (
        request.index,
        _CREATED,
        _model(request.model),
    )
    choice = b'"choices":[{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}]}'
    for index, one in enumerate(_prompts(body.prompt)):
        prompt = _text_of_prompt(one)
        text, _, finish = _echo(prompt, 0, body.max_tokens)
        for piece in _PIECES.findall(text):
            yield head + choice % (index, quote(piece).encode(), b"null")
        yield head + choice % (index, b'""', b'"%b"' % finish)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield head + b'"choices":[],"usage":%b}' % _chat_usage(usage)


# --- responses ----------------------------------------------------------------------------------------


def _answer_response(request: Request) -> Answer:
    text, usage, finish = _response_text(_response(request.body))
    return Answer(200, _response_body(request, text, usage, finish), usage)


def _response_text(body: _Response) -> tuple[str, Usage, bytes]:
    if isinstance(body.input, str):
        texts = [body.input]
    elif body.input:
        texts = [_text_of(message.content) for message in body.input]
    else:
        raise ValueError("input is empty")
    before = sum(len(text.split()) for text in texts[:-1]) + len((body.instructions or "").split())
    return _echo(texts[-1], before, body.max_output_tokens)


def _response_body(request: Request, text: str, usage: Usage, finish: bytes) -> bytes:
    whole = finish == b"stop"
    return (
        b'{"id":"resp_%d","object":"response","created_at":%d,"status":%b,"error":null,"incomplete_details":%b,'
        b'"instructions":null,"metadata":{},"model":%b,"output":[{"type":"message","id":"msg_%d",'
        b'"status":"completed","role":"assistant","content":[{"type":"output_text","text":%b,"annotations":[]}]}],'
        b'"parallel_tool_calls":false,"temperature":1.0,"tool_choice":"auto","tools":[],"top_p":1.0,"usage":'
        b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":%d,'
        b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}}'
        % (
            request.index,
            _CREATED,
            b'"completed"' if whole else b'"incomplete"',
            b"null" if whole else b'{"reason":"max_output_tokens"}',
            _model(request.model),
            request.index,
            quote(text).encode(),
            usage.input_tokens,
            usage.output_tokens,
            usage.input_tokens + usage.output_tokens,
        )
    )


def _chunks_response(request: Request, usage: Usage) -> Iterator[bytes]:
    text, _, finish = _response_text(_response(request.body))
    item = b'"item_id":"msg_%d","output_index":0,"content_index":0' % request.index
    number = 0
    for number, piece in enumerate(_PIECES.findall(text), start=1):
        yield (
            b'{"type":"response.output_text.delta","sequence_number":%d,%b,"delta":%b,"logprobs":[]}'
            % (number, item, quote(piece).encode())
        )
    yield (
        b'{"type":"response.output_text.done","sequence_number":%d,%b,"text":%b,"logprobs":[]}'
        % (number + 1, item, quote(text).encode())
    )
    kind = b"completed" if finish == b"stop" else b"incomplete"
    body = _response_body(request, text, usage, finish)
    yield b'{"type":"response.%b","sequence_number":%d,"response":%b}' % (kind, number + 2, body)


# --- embeddings ---------------------------------------------------------------------------------------


def _answer_embedding(request: Request) -> Answer:
    body = _embedding(request.body)
    dimensions = DIMENSIONS if body.dimensions is None else body.dimensions
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"dimensions must lie between 1 and {_MAX_DIMENSIONS}")
    if body.encoding_format not in ("float", "base64"):
        raise ValueError("encoding_format must be float or base64")
    texts = [_text_of_prompt(one) for one in _prompts(body.input)]
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}'
        % (index, _show_vector(vector(text, dimensions), body.encoding_format))
        for index, text in enumerate(texts)
    )
    usage = _usage(sum(len(text.split()) for text in texts), 0)
    return Answer(
        200,
        b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}'
        % (data, _model(request.model), usage.input_tokens, usage.input_tokens),
        usage,
    )


def vector(text: str, dimensions: int) -> list[float]:
    """A unit vector made from nothing but *text*."""
    source = text.encode("utf-8", errors="surrogatepass")
    raw = b"".join(
        blake2b(source, digest_size=64, salt=block.to_bytes(8, "little")).digest()
        for block in range((2 * dimensions + 63) // 64)
    )
    numbers = struct.unpack(f"<{dimensions}h", raw[: 2 * dimensions])
    length = math.hypot(*numbers) or 1.0
    return [number / length for number in numbers]


def _show_vector(numbers: list[float], encoding: str) -> bytes:
    if encoding == "base64":
        return b'"%b"' % base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers))
    return b"[%b]" % ",".join(f"{number:.7f}" for number in numbers).encode()


# --- parts that several endpoints share ---------------------------------------------------------------


def _echo(prompt: str, tokens_before: int, limit: int | None) -> tuple[str, Usage, bytes]:
    """The text to answer with, cut to *limit* words, what it took, and why it ended."""
    words = prompt.split()
    count = len(words)
    if limit is None or count <= limit:
        return prompt, _usage(tokens_before + count, count), b"stop"
    if limit < 0:
        raise ValueError("the limit of tokens is negative")
    return " ".join(words[:limit]), _usage(tokens_before + count, limit), b"length"


def _text_of(content: str | list[_Part] | None) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part.text for part in content) if content else ""


def _prompts(given: str | list[str | int | list[int]]) -> list[str | int | list[int]]:
    """One entry for each text; a bare list of token ids is one text."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ValueError("the input is empty")
    if isinstance(given[0], int):
        return [[one for one in given if isinstance(one, int)]]
    return given


def _text_of_prompt(one: str | int | list[int]) -> str:
    if isinstance(one, str):
        return one
    return str(one) if isinstance(one, int) else " ".join(map(str, one))


@lru_cache(maxsize=64)
def _model(name: str | None) -> bytes:
    return quote("echo" if name is None else name).encode("ascii")


def _chat_usage(usage: Usage) -> bytes:
    used_in, used_out = usage.input_tokens, usage.output_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        used_in,
        used_out,
        used_in + used_out,
    )


_ANSWERS: dict[Endpoint, Callable[[Request], Answer]] = {
    Endpoint.CHAT: _answer_chat,
    Endpoint.COMPLETIONS: _answer_completion,
    Endpoint.RESPONSES: _answer_response,
    Endpoint.EMBEDDINGS: _answer_embedding,
}

_CHUNKS: dict[Endpoint, Callable[[Request, Usage], Iterator[bytes]]] = {
    Endpoint.CHAT: _chunks_chat,
    Endpoint.COMPLETIONS: _chunks_completion,
    Endpoint.RESPONSES: _chunks_response,
}
