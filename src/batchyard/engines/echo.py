"""Floor 3. The engine `echo`: repeats each prompt, with scripted latency, faults and token counts.

For demos, tests and calibration: deterministic by seed, whatever the order and the batches in which
requests come, and cheap enough that what is measured is everything around it.
"""

from __future__ import annotations

import fnmatch
import math
import os
import random
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from batchyard.clock import Clock, SystemClock
from batchyard.engines.echo_answers import answer, chunks, count_tokens, error_body
from batchyard.errors import EngineError, UsageError
from batchyard.types import Answer, Capabilities, Endpoint, Fault, FaultKind, Outcome, Request

#: What a scripted fault may be, by the word a user writes.
_FAULTS: dict[str, tuple[FaultKind, int | None, str]] = {
    "429": (FaultKind.RATE_LIMITED, 429, "The engine echo was told to answer 429 (too many requests)."),
    "timeout": (FaultKind.TIMEOUT, None, "The engine echo was told not to answer in time."),
    "disconnect": (FaultKind.DISCONNECTED, None, "The engine echo was told to break the connection."),
    "unreachable": (FaultKind.UNREACHABLE, None, "The engine echo was told to be unreachable."),
    "invalid": (FaultKind.INVALID_ANSWER, None, "The engine echo was told to answer with no JSON."),
    "died": (FaultKind.ENGINE_DIED, None, "The engine echo was told to die."),
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|us)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True)
class EchoFault:
    """One rule: these requests meet this instead of their answer."""

    #: `timeout`, `disconnect`, `unreachable`, `invalid`, `died`, or an HTTP status from 400 to 599.
    what: str
    #: Requests whose `custom_id` fits this shell pattern; None means by `share`.
    pattern: str | None = None
    #: Share of all requests, 0 to 1, drawn by seed and `custom_id`.
    share: float = 0.0
    #: Only the first so many attempts; None means for ever.
    attempts: int | None = None
    #: What a 429 or 503 asks to wait.
    retry_after_s: float | None = None

    def outcome(self) -> Outcome:
        """What the request gets."""
        if self.what in _FAULTS:
            kind, status, message = _FAULTS[self.what]
            body = b"" if status is None else error_body(message, kind=kind.value)
            return Fault(kind, message, status, body, self.retry_after_s)
        status = int(self.what)
        message = f"The engine echo was told to answer {status}."
        if status < 500:
            return Answer(status, error_body(message))
        body = error_body(message, kind="server_error")
        return Fault(FaultKind.SERVER_ERROR, message, status, body, self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a dispatch takes: `fixed`, `uniform` between two bounds, or `exponential` about a mean."""

    shape: str
    low_s: float
    high_s: float = 0.0

    def draw(self, dice: random.Random) -> float:
        """One latency in seconds."""
        match self.shape:
            case "uniform":
                return dice.uniform(self.low_s, self.high_s)
            case "exponential":
                return dice.expovariate(1.0 / self.low_s) if self.low_s else 0.0
            case _:
                return self.low_s


class EchoEngine:
    """Answers every request with its own prompt.

    Args:
        latency_s: what each dispatch takes, as a number or a distribution.
        tokens_per_s: adds the time that the longest answer of the dispatch takes at this rate.
        context_tokens: a request whose prompt is longer is answered 400.
        faults: rules, of which the first that fits a request counts.
        log_path: each dispatch appends the custom ids that it carries, one a line, in one write, so
            that calls can be counted over processes that were killed.
    """

    def __init__(
        self,
        latency_s: float | Latency = 0.0,
        *,
        tokens_per_s: float | None = None,
        faults: Iterable[EchoFault] = (),
        seed: int = 0,
        max_batch: int = 64,
        slots: int = 8,
        context_tokens: int | None = None,
        clock: Clock | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = "echo"
        self.model: str | None = None
        self._latency = latency_s if isinstance(latency_s, Latency) else Latency("fixed", latency_s)
        self._tokens_per_s = tokens_per_s
        self._rules = [(rule, rule.outcome(), _matcher(rule, seed)) for rule in faults]
        self._attempts: dict[tuple[int, str], int] = {}
        self._seed = seed
        self._clock: Clock = clock or SystemClock()
        self._log_path = log_path
        self._log: int | None = None
        self._closed = False
        self._context_tokens = context_tokens
        self._capabilities = Capabilities(
            endpoints=frozenset(Endpoint),
            max_batch=max_batch,
            slots=slots,
            streams=True,
            several_models=True,
            context_tokens=context_tokens,
        )

    def __repr__(self) -> str:
        return f"<EchoEngine [{self._latency}, {len(self._rules)} fault rules, seed {self._seed}]>"

    @classmethod
    def from_spec(cls, spec: str) -> EchoEngine:
        """An engine from words such as `latency=20ms,fail=2%:500,seed=1`.

        `latency` takes `20ms`, `10ms..50ms` or `exp:20ms`. `fail` takes WHO:WHAT and may be repeated:
        WHO is a share (`2%`) or a pattern of custom ids (`row-7*`); WHAT is an HTTP status, `timeout`,
        `disconnect`, `unreachable`, `invalid` or `died`, then `@2s` to ask for a wait and `x3` to fail
        the first three attempts only, as in `fail=row-7:429@2sx3`. Further: `tokens_per_s`, `seed`,
        `max_batch`, `slots`, `context_tokens`, `log`.

        Raises:
            UsageError: a word is not understood.
        """
        return cls(**_read_spec(spec))  # type: ignore[arg-type]  # checked word by word in _read_spec

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def start(self) -> None:
        self._closed = False
        if self._log_path is not None and self._log is None:
            try:
                self._log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError as error:
                raise EngineError(
                    f"The engine echo cannot write its log {os.fspath(self._log_path)}: {error.strerror}."
                ) from error

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        if self._closed:
            raise EngineError("The engine echo is closed.")
        if self._log is not None:
            os.write(self._log, "".join(map(_log_line, requests)).encode("utf-8", errors="replace"))
        outcomes: list[Outcome] = (
            [self._outcome(request) for request in requests]
            if self._rules or self._context_tokens is not None
            else [answer(request) for request in requests]
        )
        # Also with no latency: the loop's other tasks get their turn once a dispatch.
        await self._clock.sleep(self._duration_s(requests, outcomes))
        return outcomes

    async def stream(self, request: Request) -> AsyncIterator[bytes | Outcome]:
        outcome = self._outcome(request)
        if isinstance(outcome, Fault) or not outcome.succeeded:
            yield outcome
            return
        pieces = list(chunks(request))
        pause_s = self._duration_s([request], [outcome]) / len(pieces)
        for piece in pieces:
            await self._clock.sleep(pause_s)
            yield piece

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return [count_tokens(request) for request in requests]

    async def close(self) -> None:
        self._closed = True
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _outcome(self, request: Request) -> Outcome:
        custom_id = request.custom_id
        for place, (rule, outcome, fits) in enumerate(self._rules):
            if not fits(custom_id):
                continue
            if rule.attempts is not None:
                key = (place, custom_id)
                made = self._attempts[key] = self._attempts.get(key, 0) + 1
                if made > rule.attempts:
                    continue
            return outcome
        reply = answer(request)
        tokens, limit = reply.usage.input_tokens, self._context_tokens
        if limit is not None and tokens > limit:
            message = f"The prompt has {tokens} tokens; the context of this model holds {limit}."
            return Answer(400, error_body(message, code="context_length_exceeded"))
        return reply

    def _duration_s(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> float:
        latency = self._latency
        if latency.shape == "fixed":
            duration_s = latency.low_s
        else:
            key = requests[0].custom_id.encode("utf-8", errors="replace") if requests else b""
            duration_s = latency.draw(random.Random(zlib.crc32(key, self._seed & 0xFFFFFFFF)))
        if self._tokens_per_s is not None:
            longest = max((one.usage.output_tokens for one in outcomes if isinstance(one, Answer)), default=0)
            duration_s += longest / self._tokens_per_s
        return duration_s


def _matcher(rule: EchoFault, seed: int) -> Callable[[str], bool]:
    if rule.pattern is not None:
        return re.compile(fnmatch.translate(rule.pattern)).match  # type: ignore[return-value]  # truth is all that counts
    limit = round(rule.share * 2**32)
    start = zlib.crc32(rule.what.encode(), seed & 0xFFFFFFFF)

    def drawn(custom_id: str) -> bool:
        return zlib.crc32(custom_id.encode("utf-8", errors="replace"), start) < limit

    return drawn


def _log_line(request: Request) -> str:
    return request.custom_id.replace("\\", "\\\\").replace("\n", "\\n") + "\n"


# --- reading a spec -----------------------------------------------------------------------------------


def _read_spec(spec: str) -> dict[str, object]:
    options: dict[str, object] = {}
    faults: list[EchoFault] = []
    for part in filter(None, (one.strip() for one in spec.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise _not_understood(part)
        match key:
            case "latency":
                options["latency_s"] = _read_latency(value, part)
            case "fail":
                faults.append(_read_fault(value, part))
            case "tokens_per_s":
                options[key] = _read_number(value, part)
            case "seed" | "max_batch" | "slots" | "context_tokens":
                if not value.isdecimal() or (key != "seed" and int(value) < 1):
                    raise _not_understood(part)
                options[key] = int(value)
            case "log":
                options["log_path"] = value
            case _:
                raise _not_understood(part)
    options["faults"] = faults
    return options


def _read_latency(value: str, part: str) -> Latency:
    if value.startswith("exp:"):
        return Latency("exponential", _read_duration(value.removeprefix("exp:"), part))
    low, dots, high = value.partition("..")
    if not dots:
        return Latency("fixed", _read_duration(value, part))
    return Latency("uniform", _read_duration(low, part), _read_duration(high, part))


def _read_fault(value: str, part: str) -> EchoFault:
    who, colon, rest = value.rpartition(":")
    match = re.fullmatch(r"([a-z]+?|\d{3})(?:@([\d.]+(?:ms|us|s|m)?))?(?:x(\d+))?", rest)
    if not colon or not who or match is None:
        raise _not_understood(part)
    what, wait, attempts = match.groups()
    if what not in _FAULTS and not (what.isdecimal() and 400 <= int(what) < 600):
        raise _not_understood(part)
    share = _read_number(who[:-1], part) / 100 if who.endswith("%") else 0.0
    return EchoFault(
        what,
        pattern=None if who.endswith("%") else who,
        share=share,
        attempts=None if attempts is None else int(attempts),
        retry_after_s=None if wait is None else _read_duration(wait, part),
    )


def _read_duration(value: str, part: str) -> float:
    match = _DURATION.fullmatch(value)
    if match is None:
        raise _not_understood(part)
    return float(match[1]) * _UNITS[match[2]]


def _read_number(value: str, part: str) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise _not_understood(part) from error
    if not math.isfinite(number) or number <= 0:
        raise _not_understood(part)
    return number


def _not_understood(part: str) -> UsageError:
    return UsageError(
        f"The engine echo does not understand {part!r}. "
        "An example of what it takes: echo:latency=20ms,fail=2%:500,fail=row-7*:429@1sx2,seed=1."
    )
