"""Floor 3. The engine `llama`: a language model on this machine.

llama.cpp's server runs in a child process and does the continuous batching; this side speaks HTTP with
it over loopback, always streaming, so that a cancelled request frees its slot at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import msgspec

from batchyard.clock import Clock, SystemClock
from batchyard.engines.child import ChildProcess, RestartPolicy
from batchyard.engines.llama.assemble import NoAnswer, assemble
from batchyard.engines.models import DEFAULT_LANGUAGE, resolve
from batchyard.engines.models.gguf_file import check_gguf
from batchyard.engines.openai.sse import SseParser
from batchyard.errors import EngineError, ModelError
from batchyard.events import Event, EventBus
from batchyard.types import Answer, Capabilities, Endpoint, Fault, FaultKind, Outcome, PrefixCache, Request

_ENDPOINTS = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES})
#: A request's context where the model could take more: eight slots of it fit in a small machine's memory.
_DEFAULT_CONTEXT = 4096
_MAX_CHUNK_BYTES = 64 << 20
#: How long a process that takes no connections may take to be seen dead.
_DYING_S = 5.0
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_TRUE = msgspec.Raw(b"true")
_WITH_USAGE = msgspec.Raw(b'{"include_usage":true}')


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the child process is told."""

    model: str
    name: str
    parallel: int
    context_tokens: int
    max_output_tokens: int
    threads: int
    prompt_cache_mib: int
    micro_batch: int | None
    flash_attention: bool | None
    kv_cache_type: str | None
    speculate_ngrams: bool


class LlamaEngine:
    """llama.cpp with one model.

    Args:
        model: a path, a catalogue name, `package:…` or `hf:…`; see `engines.models.resolve`.
        parallel: requests that it works on at once.
        context_tokens: the most tokens, prompt and output together, of one request.
        max_output_tokens: the most tokens that a request without `max_tokens` is given.
        prompt_cache_mib: memory for prompts that may come again.
        micro_batch: prompt tokens computed at once (llama.cpp's `n_ubatch`).
        kv_cache_type: such as `f16` or `q8_0`.
        speculate_ngrams: guess from the prompt; pays where answers copy from it.
    """

    name = "llama"

    def __init__(
        self,
        model: str | None = None,
        *,
        parallel: int = 8,
        context_tokens: int | None = None,
        max_output_tokens: int = 1024,
        threads: int | None = None,
        prompt_cache_mib: int = 512,
        micro_batch: int | None = None,
        flash_attention: bool | None = None,
        kv_cache_type: str | None = None,
        speculate_ngrams: bool = False,
        events: EventBus | None = None,
        clock: Clock | None = None,
        restart: RestartPolicy | None = None,
    ) -> None:
        self._wanted = model or DEFAULT_LANGUAGE
        self.model: str | None = self._wanted
        self._parallel = parallel
        self._context = context_tokens
        self._settings: dict[str, Any] = {
            "max_output_tokens": max_output_tokens,
            "threads": threads or len(os.sched_getaffinity(0)),
            "prompt_cache_mib": prompt_cache_mib,
            "micro_batch": micro_batch,
            "flash_attention": flash_attention,
            "kv_cache_type": kv_cache_type,
            "speculate_ngrams": speculate_ngrams,
        }
        self._events = events or EventBus()
        self._clock = clock or SystemClock()
        self._restart = restart or RestartPolicy()
        self._deaths: list[float] = []
        self._options: ServerOptions | None = None
        self._child: ChildProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._up = asyncio.Event()
        self._url = ""
        self._broken: EngineError | None = None
        self._running = 0

    def __repr__(self) -> str:
        pid = None if self._child is None else self._child.pid
        return f"<LlamaEngine {self.model} [{self._running} running, pid {pid}]>"

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            endpoints=_ENDPOINTS,
            max_batch=1,
            slots=self._parallel,
            streams=True,
            context_tokens=self._context,
            prefix_cache=PrefixCache.SLOT,
        )

    async def start(self) -> None:
        if self._session is not None:
            return
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, resolve, self._wanted, self._events)
        facts = await loop.run_in_executor(None, check_gguf, found.path)
        self.model = found.name
        trained = facts.trained_context or _DEFAULT_CONTEXT
        self._context = min(self._context or _DEFAULT_CONTEXT, trained)
        self._options = ServerOptions(
            model=str(found.path),
            name=found.name,
            parallel=self._parallel,
            context_tokens=self._context,
            **self._settings,
        )
        self._broken = None
        self._session = aiohttp.ClientSession(
            # llama.cpp ends its connections after a stream; a kept one would break under the next request.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        try:
            await self._launch()
        except EngineError as error:
            await self.close()
            raise ModelError(str(error)) from error
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.create_task(self._watch())

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        if len(requests) == 1:
            return [await self._answer(requests[0])]
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Outcome]:
        refused = self._refused(request)
        if refused is not None:
            yield refused
            return
        await self._ready()
        try:
            async with aclosing(self._chunks(request, usage=False)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except _Status as problem:
            yield problem.outcome()
        except (aiohttp.ClientError, OSError):
            yield self._died()

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        await self._ready()
        return [await self._count(request) for request in requests]

    async def close(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        self._up.clear()
        self._broken = self._broken or EngineError("The engine llama is closed.")
        child, self._child = self._child, None
        if child is not None:
            await child.stop()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # --- the child --------------------------------------------------------------------------------

    async def _launch(self) -> None:
        assert self._options is not None
        child = ChildProcess(
            "batchyard.engines.llama.child", [json.dumps(asdict(self._options))], name="llama"
        )
        ready = await child.start()
        self._child = child
        self._url = ready["url"]
        self._up.set()

    async def _watch(self) -> None:
        """Start the child again whenever it dies, until it dies too often."""
        loop = asyncio.get_running_loop()
        while True:
            child = self._child
            assert child is not None
            await child.process.wait()
            self._up.clear()
            how = await child.wait()
            last_words = child.last_words
            await child.stop()
            self._deaths.append(loop.time())
            message = f"The llama process {how}."
            pause_s = self._restart.pause_s(self._deaths, loop.time())
            if pause_s is None:
                self._fail(
                    f"{message} It died {len(self._deaths)} times; it is not started again. {last_words}"
                )
                return
            await self._clock.sleep(pause_s)
            try:
                await self._launch()
            except EngineError as error:
                self._fail(f"{message} It could not be started again: {error}")
                return
            fields = {"engine": self.name, "message": f"{message} It has been started again."}
            self._events.emit(Event("engine.restarted", self._clock.wall(), fields))

    def _fail(self, message: str) -> None:
        self._broken = EngineError(message)
        self._up.set()

    async def _ready(self) -> None:
        if not self._up.is_set() and self._broken is None:
            await self._up.wait()
        if self._broken is not None:
            raise self._broken

    # --- requests ---------------------------------------------------------------------------------

    def _refused(self, request: Request) -> Answer | None:
        if request.endpoint not in _ENDPOINTS:
            return Answer(400, _envelope(f"The engine llama does not answer {request.endpoint}."))
        try:
            _read_fields(request.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Answer(400, _envelope(f"The body is not a JSON object: {error}."))
        return None

    async def _answer(self, request: Request) -> Outcome:
        refused = self._refused(request)
        if refused is not None:
            return refused
        await self._ready()
        child = self._child
        self._running += 1
        try:
            try:
                chunks = await self._all_chunks(request)
            except aiohttp.ClientConnectorError:
                # Nothing was sent: the process has just died, and its end will be noticed in a moment.
                await self._notice_the_end_of(child)
                await self._ready()
                chunks = await self._all_chunks(request)
            body, usage = assemble(request.endpoint, chunks, self.model or "llama")
        except _Status as problem:
            return problem.outcome()
        except NoAnswer as problem:
            return await self._unfinished(problem)
        except (aiohttp.ClientError, OSError):
            # Whoever tries again at once must not meet the same dying process.
            await self._notice_the_end_of(child)
            return self._died()
        else:
            return Answer(200, body, usage)
        finally:
            self._running -= 1

    async def _all_chunks(self, request: Request) -> list[bytes]:
        async with aclosing(self._chunks(request, usage=True)) as stream:
            return [chunk async for chunk in stream]

    @staticmethod
    async def _notice_the_end_of(dying: ChildProcess | None) -> None:
        """Its connections break a moment before its end is seen; wait for that, if it comes."""
        if dying is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_S):
                    await dying.process.wait()

    async def _chunks(self, request: Request, *, usage: bool) -> AsyncGenerator[bytes]:
        session = self._session
        if session is None:
            raise EngineError("The engine llama is not started, or closed.")
        fields = {**_read_fields(request.body), "stream": _TRUE}
        if usage:
            fields["stream_options"] = _WITH_USAGE
        body = msgspec.json.encode(fields)
        headers = {"Content-Type": "application/json"}
        async with session.post(self._url + request.endpoint, data=body, headers=headers) as reply:
            if reply.status != 200:
                raise _Status(reply.status, await reply.read())
            parser = SseParser(_MAX_CHUNK_BYTES)
            async for piece in reply.content.iter_any():
                for event in parser.feed(piece):
                    if event != b"[DONE]":
                        yield event

    async def _unfinished(self, problem: NoAnswer) -> Outcome:
        if problem.error is not None:
            code = problem.error.get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            return _Status(status, msgspec.json.encode({"error": problem.error})).outcome()
        # A stream that ends early is what a dying child looks like from here.
        return self._died() if not self._up.is_set() else Fault(FaultKind.DISCONNECTED, f"{problem}.")

    def _died(self) -> Fault:
        return Fault(FaultKind.ENGINE_DIED, "The engine process ended under this request.")

    async def _count(self, request: Request) -> int | None:
        """Prompt tokens, template included; None where the prompt has a form that is not text."""
        fields = msgspec.json.decode(request.body)
        try:
            match request.endpoint:
                case Endpoint.CHAT:
                    prompt = (await self._ask("/apply-template", {"messages": fields["messages"]}))["prompt"]
                case Endpoint.RESPONSES:
                    messages = fields["input"]
                    if isinstance(messages, str):
                        messages = [{"role": "user", "content": messages}]
                    prompt = (await self._ask("/apply-template", {"messages": messages}))["prompt"]
                case _:
                    prompt = fields["prompt"]
            if not isinstance(prompt, str):
                return None
            found = await self._ask("/tokenize", {"content": prompt, "parse_special": True})
        except (aiohttp.ClientError, OSError, KeyError):
            return None
        return len(found["tokens"])

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise EngineError("The engine llama is not started, or closed.")
        async with self._session.post(self._url + path, json=body, raise_for_status=True) as reply:
            found: dict[str, Any] = await reply.json()
            return found


class _Status(Exception):  # noqa: N818 - names what came back
    """llama.cpp answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = _as_envelope(body)

    def outcome(self) -> Outcome:
        """A 4xx is an answer; the rest may be tried again."""
        if self.status < 500:
            return Answer(self.status, self.body)
        message = f"The llama process answered {self.status}."
        return Fault(FaultKind.SERVER_ERROR, message, self.status, self.body)


def _as_envelope(body: bytes) -> bytes:
    """llama.cpp's error in the OpenAI envelope, with its numbers in the message."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return _envelope(body[:200].decode("utf-8", errors="replace"), "server_error")
    message, kind = str(error.get("message")), str(error.get("type"))
    if kind == "exceed_context_size_error":
        message = (
            f"The prompt has {error['n_prompt_tokens']} tokens; a request may have {error['n_ctx']}, "
            "prompt and output together. Shorten the prompt."
        )
        return _envelope(message, "invalid_request_error", "context_length_exceeded")
    return _envelope(message, kind)


def _envelope(message: str, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
