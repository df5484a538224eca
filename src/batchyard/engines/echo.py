"""Floor 3. The engine that computes nothing: it echoes, with scripted latency and faults.

For demos, tests and calibration. The same seed and requests give the same answers and faults. Answers
have the shapes of the OpenAI API; a token is a word.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from json import dumps
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

import msgspec

from batchyard.clock import Clock, SystemClock
from batchyard.errors import UsageError
from batchyard.types import Answer, Capabilities, Endpoint, Fault, FaultKind, Outcome, Request, Usage

_STATUS_FAULTS = {429: FaultKind.RATE_LIMITED, 408: FaultKind.TIMEOUT}
_WORD_FAULTS = {
    "timeout": FaultKind.TIMEOUT,
    "disconnect": FaultKind.DISCONNECTED,
    "unreachable": FaultKind.UNREACHABLE,
    "died": FaultKind.ENGINE_DIED,
}
_EMBEDDING_WIDTH = 8


@dataclass(frozen=True, slots=True)
class EchoFault:
    """Which requests fail, how, and for how long."""

    #: An HTTP status (4xx answers, 429 and 5xx faults), or `timeout`, `disconnect`, `unreachable`, `died`.
    what: int | str
    #: The share of requests that fail, chosen by a hash of custom_id and seed; or a pattern of custom_ids.
    share: float = 0.0
    pattern: str | None = None
    #: How many attempts of a request fail; None for ever.
    times: int | None = None
    retry_after_s: float | None = None


class EchoEngine:
    """Echoes the prompt.

    Args:
        latency_s: how long each dispatch takes.
        faults: which requests fail; the first that fits decides.
        max_batch: requests a dispatch may carry.
        slots: dispatches it works on at once, for the caller to know.
        log_path: a file (or pipe) to which the custom_ids of each dispatch are appended, a line each, in
            one write before anything is answered.
    """

    name = "echo"
    model: str | None = "echo"

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        faults: Sequence[EchoFault] = (),
        seed: int = 0,
        max_batch: int = 64,
        slots: int = 8,
        context_tokens: int | None = None,
        log_path: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.latency_s = latency_s
        self.faults = tuple(faults)
        self.seed = seed
        self.log_path = log_path
        self.clock = clock or SystemClock()
        self._attempts: Counter[str] = Counter()
        self._log: int | None = None
        self._capabilities = Capabilities(
            endpoints=frozenset(Endpoint),
            max_batch=max_batch,
            slots=slots,
            streams=True,
            several_models=True,
            context_tokens=context_tokens,
        )

    def __repr__(self) -> str:
        return f"<EchoEngine [{self.latency_s:g} s, {len(self.faults)} scripted faults]>"

    @classmethod
    def from_spec(cls, spec: str) -> EchoEngine:
        """An engine from `latency=20ms,fail=2%:500,fail=req-7*:timeout:1,max_batch=1,seed=3,log=calls.txt`.

        `fail=WHO:WHAT[:TIMES]`, where WHO is a share such as 2% or a pattern of custom_ids.

        Raises:
            UsageError: a part of it makes no sense.
        """
        options: dict[str, Any] = {"faults": []}
        for part in filter(None, spec.split(",")):
            name, _, value = part.partition("=")
            try:
                match name:
                    case "latency":
                        scale = 0.001 if value.endswith("ms") else 1.0
                        options["latency_s"] = float(value.removesuffix("ms").removesuffix("s")) * scale
                    case "fail":
                        options["faults"].append(_parse_fault(value))
                    case "max_batch" | "slots" | "seed" | "context_tokens":
                        options[name] = int(value)
                    case "log":
                        options["log_path"] = Path(value)
                    case _:
                        raise ValueError(name)
            except ValueError as error:
                raise UsageError(
                    f"The engine echo does not understand {part!r}. It takes latency=20ms, fail=2%:500, "
                    "fail=PATTERN:timeout:1, max_batch=N, slots=N, context_tokens=N, seed=N and log=FILE."
                ) from error
        return cls(**options)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def start(self) -> None:
        if self.log_path is not None and self._log is None:
            self._log = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        if self._log is not None:
            os.write(self._log, "".join(f"{one.custom_id}\n" for one in requests).encode())
        if self.latency_s:
            await self.clock.sleep(self.latency_s)
        else:
            # Give other tasks their turn: a loop that never waits starves heartbeats and signals.
            await asyncio.sleep(0)
        if self.faults:
            return [self._scripted(one) or self._answer(one) for one in requests]
        return [self._answer(one) for one in requests]

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        text = _prompt_of(request)
        if text is None:
            return
        for place, word in enumerate(text.split() or [""]):
            if self.latency_s:
                await self.clock.sleep(self.latency_s)
            yield _chunk(request.endpoint, word if place == 0 else " " + word)

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return [None if (text := _prompt_of(one)) is None else _tokens(text) for one in requests]

    async def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _scripted(self, request: Request) -> Outcome | None:
        for fault in self.faults:
            if fault.pattern is not None:
                hit = fnmatch.fnmatchcase(request.custom_id, fault.pattern)
            else:
                draw = zlib.crc32(f"{self.seed}:{request.custom_id}".encode()) / 2**32
                hit = draw < fault.share
            if hit:
                if fault.times is not None:
                    self._attempts[request.custom_id] += 1
                    if self._attempts[request.custom_id] > fault.times:
                        return None
                return _failed(fault)
        return None

    def _answer(self, request: Request) -> Outcome:
        text = _prompt_of(request)
        if text is None:
            return _refused("The body is not what this endpoint takes.")
        tokens = _tokens(text)
        limit = self._capabilities.context_tokens
        if limit is not None and tokens > limit:
            return _refused(f"The prompt has {tokens} tokens; the context holds {limit}.")
        return Answer(200, *_body(request.endpoint, request.index, text, tokens))


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None


class _Body(msgspec.Struct):
    messages: list[_Message] | None = None
    prompt: str | list[Any] | None = None
    input: str | list[Any] | None = None


_decode = msgspec.json.Decoder(_Body).decode


def _prompt_of(request: Request) -> str | None:
    """What to echo; None where the body does not fit the endpoint."""
    try:
        body = _decode(request.body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    match request.endpoint:
        case Endpoint.CHAT:
            found = body.messages[-1].content if body.messages else None
        case Endpoint.COMPLETIONS:
            found = body.prompt
        case _:
            found = body.input
    return found if isinstance(found, str) or found is None else dumps(found)


def _tokens(text: str) -> int:
    return text.count(" ") + 1


def _body(endpoint: Endpoint, index: int, text: str, tokens: int) -> tuple[bytes, Usage]:
    quoted = encode_basestring_ascii(text)
    match endpoint:
        case Endpoint.CHAT:
            body = (
                f'{{"id":"chatcmpl-{index}","object":"chat.completion","created":0,"model":"echo","choices":[{{'
                f'"index":0,"message":{{"role":"assistant","content":{quoted}}},"finish_reason":"stop"}}],'
                f'"usage":{{"prompt_tokens":{tokens},"completion_tokens":{tokens},"total_tokens":{2 * tokens}}}}}'
            )
        case Endpoint.COMPLETIONS:
            body = (
                f'{{"id":"cmpl-{index}","object":"text_completion","created":0,"model":"echo","choices":[{{'
                f'"index":0,"text":{quoted},"finish_reason":"stop","logprobs":null}}],'
                f'"usage":{{"prompt_tokens":{tokens},"completion_tokens":{tokens},"total_tokens":{2 * tokens}}}}}'
            )
        case Endpoint.RESPONSES:
            body = (
                f'{{"id":"resp_{index}","object":"response","created_at":0,"model":"echo","status":"completed",'
                f'"error":null,"output":[{{"type":"message","id":"msg_{index}","role":"assistant",'
                f'"status":"completed","content":[{{"type":"output_text","text":{quoted},"annotations":[]}}]}}],'
                f'"usage":{{"input_tokens":{tokens},"input_tokens_details":{{"cached_tokens":0}},'
                f'"output_tokens":{tokens},"output_tokens_details":{{"reasoning_tokens":0}},'
                f'"total_tokens":{2 * tokens}}}}}'
            )
        case Endpoint.EMBEDDINGS:
            seed = zlib.crc32(text.encode("utf-8", "replace"))
            vector = [((seed >> (4 * place)) & 15) / 15 for place in range(_EMBEDDING_WIDTH)]
            body = (
                '{"object":"list","model":"echo","data":[{"object":"embedding","index":0,'
                f'"embedding":{dumps(vector)}}}],"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}'
            )
            return body.encode(), Usage(tokens)
    return body.encode(), Usage(tokens, tokens)


def _chunk(endpoint: Endpoint, text: str) -> bytes:
    if endpoint is Endpoint.CHAT:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        return dumps({"object": "chat.completion.chunk", "model": "echo", "choices": [choice]}).encode()
    if endpoint is Endpoint.COMPLETIONS:
        choice = {"index": 0, "text": text, "finish_reason": None}
        return dumps({"object": "text_completion", "model": "echo", "choices": [choice]}).encode()
    return dumps({"type": "response.output_text.delta", "delta": text}).encode()


def _failed(fault: EchoFault) -> Outcome:
    if isinstance(fault.what, str):
        return Fault(_WORD_FAULTS[fault.what], f"The script of the engine echo says: {fault.what}.")
    error = {"message": f"Scripted {fault.what}.", "type": "scripted", "param": None, "code": None}
    body = dumps({"error": error}).encode()
    kind = _STATUS_FAULTS.get(fault.what, FaultKind.SERVER_ERROR if fault.what >= 500 else None)
    if kind is None:
        return Answer(fault.what, body)
    message = f"The script of the engine echo says: HTTP {fault.what}."
    return Fault(kind, message, fault.what, body, fault.retry_after_s)


def _refused(message: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Answer(400, dumps({"error": error}).encode())


def _parse_fault(value: str) -> EchoFault:
    who, what, *times = value.split(":")
    kind: int | str = what if what in _WORD_FAULTS else int(what)
    if isinstance(kind, int) and not 400 <= kind <= 599:
        raise ValueError(what)
    count = int(times[0]) if times else None
    if who.endswith("%"):
        return EchoFault(kind, share=float(who[:-1]) / 100, times=count)
    return EchoFault(kind, pattern=who, times=count)
