"""Floor 0. The one event spine that feeds logs, progress, metrics and the dashboard.

Events are small frozen values, named `noun.verb` in the past tense. Emitting to nobody costs one
attribute check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Listener = Callable[["Event"], None]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    #: Such as `batch.updated`, `request.finished`, `dispatch.started`, `engine.restarted`.
    name: str
    #: Unix seconds.
    at: float
    fields: Mapping[str, Any] = field(default_factory=dict)


class EventBus:
    """Hands each event to every listener, in order of subscription, at once.

    A listener that raises is a bug of the listener: the error is not swallowed.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def __repr__(self) -> str:
        return f"<EventBus [{len(self._listeners)} listeners]>"

    @property
    def listened(self) -> bool:
        """Whether anybody listens; callers may skip building an event when not."""
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add *listener*; the returned function takes it away again."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Hand *event* to every listener."""
        for listener in self._listeners:
            listener(event)
