"""Batchyard: the batching layer for AI inference.

Importing this package loads the standard library only, and little of it; the command line, the engines
and the stores bring their own dependencies when they are used (`pip install 'batchyard[local]'`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from batchyard._version import __version__

if TYPE_CHECKING:
    from batchyard.batching.batcher import Batcher
    from batchyard.batching.decorator import batched
    from batchyard.batching.latency import LatencyCurve
    from batchyard.batching.policy import Adaptive, Deadline, Greedy, TcpAck, Threshold
    from batchyard.batching.stats import BatcherStats
    from batchyard.errors import (
        AnswerTimeout,
        BatcherClosed,
        BatcherError,
        BatchyardError,
        DeadlineExceeded,
        DispatchFailed,
        ItemTooLarge,
        QueueFull,
        UsageError,
        WrongLoop,
    )
    from batchyard.events import Event, EventBus

__all__ = [
    "Adaptive",
    "AnswerTimeout",
    "Batcher",
    "BatcherClosed",
    "BatcherError",
    "BatcherStats",
    "BatchyardError",
    "Deadline",
    "DeadlineExceeded",
    "DispatchFailed",
    "Event",
    "EventBus",
    "Greedy",
    "ItemTooLarge",
    "LatencyCurve",
    "QueueFull",
    "TcpAck",
    "Threshold",
    "UsageError",
    "WrongLoop",
    "__version__",
    "batched",
]

#: Where each public name lives. Found when first asked for, so that the command line pays for none of it.
_HOMES = {
    "Adaptive": "batching.policy",
    "AnswerTimeout": "errors",
    "Batcher": "batching.batcher",
    "BatcherClosed": "errors",
    "BatcherError": "errors",
    "BatcherStats": "batching.stats",
    "BatchyardError": "errors",
    "Deadline": "batching.policy",
    "DeadlineExceeded": "errors",
    "DispatchFailed": "errors",
    "Event": "events",
    "EventBus": "events",
    "Greedy": "batching.policy",
    "ItemTooLarge": "errors",
    "LatencyCurve": "batching.latency",
    "QueueFull": "errors",
    "TcpAck": "batching.policy",
    "Threshold": "batching.policy",
    "UsageError": "errors",
    "WrongLoop": "errors",
    "batched": "batching.decorator",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batchyard' has no attribute {name!r}")
    value: object = getattr(import_module(f"batchyard.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
