"""Floor 3. What an engine is: a small protocol with capabilities, not a class hierarchy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from batchyard.types import Capabilities, Outcome, Request


class Engine(Protocol):
    """What computes.

    The life of an engine is `start`, any number of `dispatch` and `stream` calls (many at once), then
    `close`. Every implementation passes `tests/conformance/test_engines.py`.
    """

    #: Short name for people, such as `llama` or `openai`.
    name: str
    #: The model that answers, as results should name it; None where the request decides.
    model: str | None

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; final once `start` has returned."""
        ...

    async def start(self) -> None:
        """Make the engine ready to answer.

        Raises:
            EngineError: it cannot be used at all, said in one clear sentence (server unreachable,
                model missing or damaged).
        """
        ...

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answer 1 to `capabilities.max_batch` requests; outcome i belongs to request i.

        Never raises for what one request or the upstream did: that is an `Answer` with a 4xx status
        or a `Fault`. A cancelled call stops the computing as soon as the engine can.

        Raises:
            EngineError: the engine cannot be used any more, by any request.
        """
        ...

    def stream(self, request: Request) -> AsyncIterator[bytes | Outcome]:
        """Yield the JSON chunks of a streamed answer as the endpoint's API defines them, without SSE framing.

        What goes wrong comes as the last item: an `Answer` that is no stream (a 4xx), or the `Fault` that
        ended it.

        Only where `capabilities.streams`. Closing the iterator stops the computing.
        """
        ...

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        """Prompt tokens of each request; None where the engine cannot tell without computing."""
        ...

    async def close(self) -> None:
        """Stop, free everything, end child processes. Safe to call twice."""
        ...


@runtime_checkable
class Checked(Protocol):
    """An engine that can say whether it is well without computing anything."""

    async def check(self) -> None:
        """Look whether it can be used.

        Raises:
            EngineError: it cannot, said in one clear sentence.
        """
        ...
