"""Floor 3. The engine `onnx`: an embedding model on this machine, in a child process.

Vectors are the same bits whatever else is computed; a self-test at the start makes sure of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncGenerator, Sequence

import msgspec
import numpy as np

from batchyard.clock import Clock, SystemClock
from batchyard.engines.child import ChildProcess, RestartPolicy
from batchyard.engines.models import DEFAULT_EMBEDDING, resolve
from batchyard.engines.models.cache import cache_folder
from batchyard.engines.onnx.bodies import BadRequest, EmbeddingRequest, read_body, write_body
from batchyard.engines.onnx.frames import (
    Count,
    Counts,
    Drop,
    FromChild,
    Job,
    ToChild,
    Vectors,
    frame,
    read_from_child,
)
from batchyard.engines.onnx.graph import Precision
from batchyard.errors import EngineError, ModelError
from batchyard.events import Event, EventBus
from batchyard.types import Answer, Capabilities, Endpoint, Fault, FaultKind, Outcome, Request, Usage

#: Real tokens that one thread computes at once; more gains nothing on a CPU, fewer costs.
_PACK_TOKENS = 256
_DIED = Fault(FaultKind.ENGINE_DIED, "The engine process ended under this request.")


class OnnxEngine:
    """A sentence embedding model on ONNX Runtime.

    Args:
        model: a catalogue name or a folder with `model.safetensors`, `tokenizer.json` and `config.json`.
        precision: `fp32`, or `int8` with a scale for each row, which is faster and nearly as exact.
        workers: threads that compute, one pack each; None for one a core.
        pack_tokens: real tokens in a pack.
        max_input_tokens: longer texts are cut to this; None for what the model was made for. Never more than
            the model has positions for.
    """

    name = "onnx"

    def __init__(
        self,
        model: str | None = None,
        *,
        precision: Precision = "fp32",
        workers: int | None = None,
        pack_tokens: int = _PACK_TOKENS,
        max_input_tokens: int | None = None,
        events: EventBus | None = None,
        clock: Clock | None = None,
        restart: RestartPolicy | None = None,
    ) -> None:
        self._wanted = model or DEFAULT_EMBEDDING
        self.model: str | None = self._wanted
        self._precision = precision
        self._workers = workers or len(os.sched_getaffinity(0))
        self._pack_tokens = pack_tokens
        self._max_input_tokens = max_input_tokens
        self._events = events or EventBus()
        self._clock = clock or SystemClock()
        self._restart = restart or RestartPolicy()
        self._child: ChildProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._broken: EngineError | None = None
        self._deaths: list[float] = []
        self._waiting: dict[int, asyncio.Future[FromChild | None]] = {}
        self._numbers = itertools.count()
        self._folder = ""
        self._width = self._vocabulary = 0
        self._max_tokens: int | None = None
        self._dimensions: tuple[int, ...] = ()
        #: Whether the self-test found the vectors the same in every company.
        self.batch_invariant = False

    def __repr__(self) -> str:
        pid = None if self._child is None else self._child.pid
        return f"<OnnxEngine {self.model} {self._precision} [{len(self._waiting)} jobs running, pid {pid}]>"

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def capabilities(self) -> Capabilities:
        # Texts of any length are taken: what is too long is cut, and the answer says so.
        return Capabilities(endpoints=frozenset({Endpoint.EMBEDDINGS}), max_batch=64, slots=4)

    async def start(self) -> None:
        if self._reader is not None:
            return
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, resolve, self._wanted, self._events)
        if not found.path.is_dir():
            raise ModelError(f"{found.path} is no folder of an embedding model. Name the folder it lies in.")
        self._folder, self.model, self._broken = str(found.path), found.name, None
        try:
            await self._launch()
        except EngineError as error:
            await self.close()
            raise ModelError(str(error)) from error
        except BaseException:
            await self.close()
            raise
        self._reader = asyncio.create_task(self._serve())

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        await self._ready()
        outcomes: list[Outcome | None] = [None] * len(requests)
        wanted: list[tuple[int, EmbeddingRequest]] = []
        for place, request in enumerate(requests):
            try:
                wanted.append((place, self._read(request)))
            except BadRequest as error:
                outcomes[place] = _refused(str(error), error.param)
        jobs = [self._ask(Job(next(self._numbers), asked.inputs)) for _, asked in wanted]
        said = await asyncio.gather(*jobs)
        for (place, asked), answer in zip(wanted, said, strict=True):
            outcomes[place] = self._outcome(asked, answer)
        return [outcome for outcome in outcomes if outcome is not None]

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Outcome]:
        """Embeddings do not stream: yields the refusal."""
        yield _refused(f"{request.endpoint} does not stream.", "stream")

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        await self._ready()
        counts: list[int | None] = [None] * len(requests)
        owners: list[int] = []
        texts: list[str] = []
        for place, request in enumerate(requests):
            try:
                inputs = self._read(request).inputs
            except BadRequest:
                continue
            counts[place] = sum(len(one) for one in inputs if not isinstance(one, str))
            here = [one for one in inputs if isinstance(one, str)]
            texts += here
            owners += [place] * len(here)
        if not texts:
            return counts
        answer = await self._ask(Count(next(self._numbers), texts))
        if not isinstance(answer, Counts):
            return [None] * len(requests)
        for place, tokens in zip(owners, answer.tokens, strict=True):
            counts[place] = (counts[place] or 0) + tokens
        return counts

    async def close(self) -> None:
        self._broken = self._broken or EngineError("The engine onnx is closed.")
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self._up.set()
        self._give_up_waiting()
        child, self._child = self._child, None
        if child is not None:
            await child.stop()

    # --- the child --------------------------------------------------------------------------------

    async def _launch(self) -> None:
        options = {
            "folder": self._folder,
            "precision": self._precision,
            "cache": str(cache_folder() / "graphs"),
            "workers": self._workers,
            "pack_tokens": self._pack_tokens,
            "max_input_tokens": self._max_input_tokens,
        }
        child = ChildProcess("batchyard.engines.onnx.child", [json.dumps(options)], name="onnx")
        ready = await child.start()
        self._child = child
        self._width, self._max_tokens = ready["hidden"], ready["max_tokens"]
        self._vocabulary = ready["vocabulary"]
        self._dimensions = tuple(ready["dimensions"])
        self.batch_invariant = ready["invariant"]
        if not self.batch_invariant:
            message = (
                "On this machine texts that are computed together change each other's vectors, "
                "so the engine onnx computes each text alone. That is slower."
            )
            self._tell("engine.not_invariant", message)
        self._up.set()

    async def _serve(self) -> None:
        """Hand answers to whoever waits for them; start the child again when it dies."""
        loop = asyncio.get_running_loop()
        while True:
            child = self._child
            assert child is not None
            assert child.process.stdout is not None
            while (message := await read_from_child(child.process.stdout)) is not None:
                future = self._waiting.pop(message.id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            self._up.clear()
            self._give_up_waiting()
            how = await child.wait()
            await child.stop()
            self._deaths.append(loop.time())
            pause_s = self._restart.pause_s(self._deaths, loop.time())
            if pause_s is None:
                self._fail(f"The onnx process {how}; it died {len(self._deaths)} times. {child.last_words}")
                return
            await self._clock.sleep(pause_s)
            try:
                await self._launch()
            except EngineError as error:
                self._fail(f"The onnx process {how}. It could not be started again: {error}")
                return
            self._tell("engine.restarted", f"The onnx process {how}. It has been started again.")

    def _tell(self, event: str, message: str) -> None:
        self._events.emit(Event(event, self._clock.wall(), {"engine": self.name, "message": message}))

    def _fail(self, message: str) -> None:
        self._broken = EngineError(message)
        self._up.set()

    def _give_up_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)

    async def _ready(self) -> None:
        if not self._up.is_set() and self._broken is None:
            await self._up.wait()
        if self._broken is not None:
            raise self._broken

    async def _ask(self, message: Job | Count) -> FromChild | None:
        """The child's answer to *message*; None when it died."""
        if not self._up.is_set():
            return None
        future: asyncio.Future[FromChild | None] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        try:
            await self._send(message)
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(message.id, None) is not None and isinstance(message, Job):
                await self._send(Drop(message.id))
            raise

    async def _send(self, message: ToChild) -> None:
        child = self._child
        if child is None or child.process.stdin is None:
            return
        try:
            child.process.stdin.write(frame(message))
            await child.process.stdin.drain()
        except ConnectionError:
            return  # its end is noticed by the reader, which tells whoever waits

    # --- requests ---------------------------------------------------------------------------------

    def _read(self, request: Request) -> EmbeddingRequest:
        if request.endpoint is not Endpoint.EMBEDDINGS:
            raise BadRequest(f"The engine onnx does not answer {request.endpoint}.")
        return read_body(
            request.body, width=self._width, dimensions=self._dimensions, vocabulary=self._vocabulary
        )

    def _outcome(self, asked: EmbeddingRequest, answer: FromChild | None) -> Outcome:
        match answer:
            case Vectors():
                vectors = np.frombuffer(answer.data, dtype=np.float32).reshape(len(asked.inputs), self._width)
                tokens = sum(answer.tokens)
                body = write_body(asked, vectors, tokens, self.model or "onnx", answer.cut)
                if answer.cut and self._events.listened:
                    self._tell(
                        "request.truncated",
                        f"{len(answer.cut)} of {len(asked.inputs)} texts were longer than the model's "
                        f"{self._max_tokens} tokens and were embedded in part.",
                    )
                return Answer(200, body, Usage(tokens))
            case _:
                return _DIED


def _refused(message: str, param: str | None) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return Answer(400, msgspec.json.encode({"error": error}))
