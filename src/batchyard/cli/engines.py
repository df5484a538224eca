"""Floor 9. From `--engine`, `--model` and `--base-url` to an engine; each is imported only when named."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from batchyard.engines.protocol import Engine
from batchyard.errors import UsageError
from batchyard.events import EventBus
from batchyard.types import Endpoint

#: Requests in flight where neither the user nor the engine says.
DEFAULT_CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What the user asked to compute with."""

    engine: str
    model: str | None = None
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 600.0
    concurrency: int | None = None

    def settings(self) -> dict[str, str | None]:
        """What decides the answers; kept with the run and compared when it is resumed."""
        return {"engine": self.engine, "model": self.model, "base_url": self.base_url}


def choose_engine(
    engine: str | None, model: str | None, base_url: str | None, endpoint: Endpoint | None
) -> str:
    """The engine's name, where the user left it open: by the URL given, else by what is asked for.

    Raises:
        UsageError: the options contradict each other.
    """
    if engine is None:
        if base_url is not None:
            return "openai"
        return "onnx" if endpoint is Endpoint.EMBEDDINGS else "llama"
    name = engine.partition(":")[0]
    if name not in _BUILDERS:
        raise UsageError(f"There is no engine {name!r}. The engines are: {', '.join(sorted(_BUILDERS))}.")
    if name == "openai" and base_url is None:
        raise UsageError(
            "The engine openai needs --base-url, for example --base-url http://127.0.0.1:8000/v1."
        )
    if name != "openai" and base_url is not None:
        raise UsageError(f"--base-url is for the engine openai; the engine {name} computes on this machine.")
    if name == "echo" and model is not None:
        raise UsageError("The engine echo has no model. Leave --model out.")
    return engine


def build_engine(choice: EngineChoice, events: EventBus) -> Engine:
    """The engine, not started yet.

    Raises:
        UsageError: an option makes no sense.
        EngineError: a model cannot be had.
    """
    return _BUILDERS[choice.engine.partition(":")[0]](choice, events)


def concurrency_of(choice: EngineChoice, engine: Engine) -> int:
    """How many dispatches to keep in flight."""
    return choice.concurrency or engine.capabilities.slots or DEFAULT_CONCURRENCY


def _echo(choice: EngineChoice, _events: EventBus) -> Engine:
    from batchyard.engines.echo import EchoEngine  # noqa: PLC0415 - each engine brings its own packages

    return EchoEngine.from_spec(choice.engine.partition(":")[2])


def _llama(choice: EngineChoice, events: EventBus) -> Engine:
    from batchyard.engines.llama import LlamaEngine  # noqa: PLC0415 - each engine brings its own packages

    return LlamaEngine(choice.model, parallel=choice.concurrency or 8, events=events)


def _onnx(choice: EngineChoice, events: EventBus) -> Engine:
    from batchyard.engines.onnx import OnnxEngine  # noqa: PLC0415 - each engine brings its own packages

    return OnnxEngine(choice.model, events=events)


def _openai(choice: EngineChoice, _events: EventBus) -> Engine:
    from batchyard.engines.openai import OpenAIEngine  # noqa: PLC0415 - each engine brings its own packages

    assert choice.base_url is not None
    return OpenAIEngine(
        choice.base_url,
        api_key=_api_key(choice.api_key_env),
        model=choice.model,
        timeout_s=choice.timeout_s,
        api_key_env=choice.api_key_env,
    )


def _api_key(variable: str) -> str | None:
    key = os.environ.get(variable, "").strip()
    if not key.isprintable() or not key.isascii():
        raise UsageError(
            f"The environment variable {variable} holds something that cannot be an API key (a line break, "
            "or letters beyond ASCII). Set it again."
        )
    return key or None


_BUILDERS: dict[str, Callable[[EngineChoice, EventBus], Engine]] = {
    "echo": _echo,
    "llama": _llama,
    "onnx": _onnx,
    "openai": _openai,
}
