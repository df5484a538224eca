"""The public API as users see it, checked by mypy and pyright; never run."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import assert_type

from batchyard import Adaptive, Batcher, BatcherStats, LatencyCurve, batched


async def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def lengths_sync(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


async def some_fail(texts: list[str]) -> list[int | Exception]:
    return [len(text) if text else ValueError("empty") for text in texts]


assert_type(Batcher(lengths), Batcher[str, int])
assert_type(Batcher(lengths_sync, executor="inline"), Batcher[str, int])
assert_type(Batcher(lengths, max_cost=512, cost=len, padded=True), Batcher[str, int])
assert_type(Batcher(lengths, policy=Adaptive(0.2, by="aimd")), Batcher[str, int])


@batched
async def plain(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@batched(max_items=8, policy="adaptive", goal_s=0.2)
async def with_options(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@batched(max_items=8)
def sync(texts: list[str]) -> tuple[float, ...]:
    return tuple(float(len(text)) for text in texts)


class Model:
    @batched
    async def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]

    @batched(max_items=4)
    def tokens(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


class Classifier:
    def __init__(self, path: str, *, device: str = "cpu") -> None:
        self.path = path
        self.device = device

    async def __call__(self, items: list[str]) -> list[bool]:
        return [bool(item) for item in items]


class Reranker:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, items: list[tuple[str, str]]) -> list[float]:
        return [float(len(a) + len(b)) for a, b in items]


# mypy does not follow a class decorator that returns something else; the call form types everywhere.
classifier = batched(Classifier)
reranker = batched(max_items=16)(Reranker)

assert_type(plain, Batcher[str, int])
assert_type(with_options, Batcher[str, int])
assert_type(sync, Batcher[str, float])
assert_type(Model().embed, Batcher[str, list[float]])
assert_type(Model().tokens, Batcher[str, int])
assert_type(classifier("path", device="cuda"), Batcher[str, bool])
assert_type(reranker("path"), Batcher[tuple[str, str], float])


async def use() -> None:
    assert_type(plain("a"), Awaitable[int])
    assert_type(await plain("a", tier="batch", deadline_s=1.0, priority=2, timeout_s=3), int)
    assert_type(await Batcher(some_fail)("a"), int)
    assert_type(await Model().embed("a"), list[float])
    assert_type(await plain.map(["a", "b"]), list[int])
    assert_type(plain.stream(["a"]), AsyncIterator[int])
    assert_type(plain.stream(["a"], ordered=False), AsyncIterator[tuple[int, int]])
    async for index, answer in plain.stream(["a"], ordered=False):
        assert_type(index, int)
        assert_type(answer, int)
    async with Batcher(lengths) as inside:
        assert_type(inside, Batcher[str, int])
    assert_type(plain.stats, BatcherStats)
    assert_type(plain.curve, LatencyCurve)


def use_from_a_thread() -> None:
    assert_type(plain.call("a"), int)
    assert_type(plain.call_map(["a"]), list[int])
    with Batcher(lengths) as inside:
        assert_type(inside, Batcher[str, int])


takes_a_text: Callable[[str], Awaitable[int]] = plain


def refused() -> None:
    plain(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    plain("a", tier=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Batcher(lengths, policy="hurry")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    classifier("path", device=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
