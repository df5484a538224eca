"""Floor 2. Tiers: latency classes, and which of them a request is in. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

#: What OpenAI's `service_tier` calls work that somebody waits for; the engine may tell them apart.
_WAITED_FOR = frozenset({"auto", "default", "fast", "priority", "scale", "ultrafast"})


@dataclass(frozen=True, slots=True)
class Tier:
    """A latency class."""

    name: str
    #: Until when a request of a deferred tier must be answered, in seconds from its arrival; None where
    #: somebody waits for the answer.
    window_s: float | None = None
    #: The longest that a request of an interactive tier should wait and run, in seconds.
    ceiling_s: float | None = None

    @property
    def interactive(self) -> bool:
        """Whether somebody waits for the answer."""
        return self.window_s is None

    def deadline(self, now: float) -> float:
        """When a request that comes now must be answered."""
        return inf if self.window_s is None else now + self.window_s


INTERACTIVE = Tier("interactive")
FLEX = Tier("flex", window_s=3_600.0)


class Tiers:
    """The tiers of a server: `interactive`, `flex` (1 hour), and those that are declared."""

    def __init__(self, declared: Sequence[Tier] = ()) -> None:
        self._by_name = {one.name: one for one in (INTERACTIVE, FLEX, *declared)}

    def __repr__(self) -> str:
        return f"<Tiers [{', '.join(self._by_name)}]>"

    @property
    def names(self) -> list[str]:
        """Their names."""
        return list(self._by_name)

    @property
    def ceiling_s(self) -> float | None:
        """The lowest ceiling of an interactive tier."""
        ceilings = [one.ceiling_s for one in self._by_name.values() if one.interactive and one.ceiling_s]
        return min(ceilings, default=None)

    def named(self, name: str | None) -> Tier | None:
        """The tier that a `service_tier` or a header names; None where there is none with this name."""
        if name is None or (name in _WAITED_FOR and name not in self._by_name):
            return self._by_name["interactive"]
        return self._by_name.get(name)
