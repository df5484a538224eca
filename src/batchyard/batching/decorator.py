"""Floor 1, asyncio shell. `@batched`: a batcher in the place of a function, a method or a class.

Knows nothing of what a batcher does; it finds out what was decorated and makes the right handle.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

from batchyard.batching.batcher import Batcher
from batchyard.batching.dispatcher import Dispatcher
from batchyard.batching.function import is_async
from batchyard.batching.options import OnError, Overflow, PolicyChoice, Where
from batchyard.batching.policy import Policy
from batchyard.errors import UsageError
from batchyard.events import EventBus

P = ParamSpec("P")
In = TypeVar("In")
Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)
Owner = TypeVar("Owner")


class BatcherOptions(TypedDict, total=False):
    """The options of `Batcher`, as `@batched` takes them."""

    max_items: int | None
    max_cost: float | None
    cost: Callable[[Any], float] | None
    padded: bool
    lookahead: int
    max_wait_s: float
    policy: PolicyChoice | Policy
    goal_s: float | None
    max_parallel: int
    max_queue: int | None
    overflow: Overflow
    allowed_sizes: Sequence[int] | None
    key: Callable[[Any], Hashable] | None
    on_error: OnError
    executor: Executor | Where
    tiers: Mapping[str, float] | None
    priority_step_s: float
    events: EventBus | None
    name: str | None


class AsyncModel(Protocol[In, Out_co]):
    """An object whose async call takes a list and gives a list."""

    async def __call__(self, items: list[In], /) -> Sequence[Out_co | Exception]: ...


class Model(Protocol[In, Out_co]):
    """An object whose call takes a list and gives a list."""

    def __call__(self, items: list[In], /) -> Sequence[Out_co | Exception]: ...


class BatchedMethod(Generic[Owner, In, Out]):
    """What `@batched` leaves in a class: each instance has a batcher of its own.

    The batcher lives as long as its instance and keeps it alive only while it has work.
    """

    def __init__(self, function: Callable[..., Any], options: BatcherOptions) -> None:
        self._function = function
        self._options = options
        self._dispatchers: dict[int, tuple[weakref.ref[Any], Dispatcher]] = {}
        update_wrapper(self, function)  # type: ignore[arg-type]  # any object takes these attributes

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", "?")
        return f"<batched method {name} [{len(self._dispatchers)} instances]>"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Owner, owner: type) -> Batcher[In, Out]: ...
    def __get__(self, instance: Owner | None, owner: type) -> Self | Batcher[In, Out]:
        if instance is None:
            return self
        found = self._dispatchers.get(id(instance))
        if found is not None and found[0]() is instance:
            dispatcher = found[1]
        else:
            dispatcher = self._dispatcher_for(instance)
        return Batcher._of(dispatcher, instance)  # noqa: SLF001 - the sister module

    def _dispatcher_for(self, instance: Any) -> Dispatcher:
        number = id(instance)
        dispatchers = self._dispatchers

        def forget(gone: weakref.ref[Any]) -> None:
            # A new instance may have got the number meanwhile.
            if (found := dispatchers.get(number)) is not None and found[0] is gone:
                del dispatchers[number]

        try:
            reference = weakref.ref(instance, forget)
        except TypeError:
            raise UsageError(
                f"@batched on {self._function.__qualname__} needs instances that weak references can point "
                'to. Add "__weakref__" to __slots__.'
            ) from None
        function = self._function
        bound: Callable[[list[Any]], Any]
        if is_async(function):

            async def bound(items: list[Any]) -> Any:
                return await function(reference(), items)

        else:

            def bound(items: list[Any]) -> Any:
                return function(reference(), items)

        bound.__qualname__ = function.__qualname__
        made: Batcher[Any, Any] = Batcher(bound, **self._options)
        dispatcher = made._dispatcher  # noqa: SLF001 - the sister module
        dispatcher.belongs_to(instance)
        dispatchers[number] = (reference, dispatcher)
        return dispatcher


class Decorator(Protocol):
    """`@batched` with its options given."""

    @overload
    def __call__(
        self, target: Callable[[list[In]], Awaitable[Sequence[Out | Exception]]], /
    ) -> Batcher[In, Out]: ...
    @overload
    def __call__(self, target: Callable[[list[In]], Sequence[Out | Exception]], /) -> Batcher[In, Out]: ...
    @overload
    def __call__(
        self, target: Callable[[Owner, list[In]], Awaitable[Sequence[Out | Exception]]], /
    ) -> BatchedMethod[Owner, In, Out]: ...
    @overload
    def __call__(
        self, target: Callable[[Owner, list[In]], Sequence[Out | Exception]], /
    ) -> BatchedMethod[Owner, In, Out]: ...
    @overload
    def __call__(self, target: Callable[P, AsyncModel[In, Out]], /) -> Callable[P, Batcher[In, Out]]: ...
    @overload
    def __call__(self, target: Callable[P, Model[In, Out]], /) -> Callable[P, Batcher[In, Out]]: ...


@overload
def batched(target: Callable[[list[In]], Awaitable[Sequence[Out | Exception]]], /) -> Batcher[In, Out]: ...
@overload
def batched(target: Callable[[list[In]], Sequence[Out | Exception]], /) -> Batcher[In, Out]: ...
@overload
def batched(
    target: Callable[[Owner, list[In]], Awaitable[Sequence[Out | Exception]]], /
) -> BatchedMethod[Owner, In, Out]: ...
@overload
def batched(
    target: Callable[[Owner, list[In]], Sequence[Out | Exception]], /
) -> BatchedMethod[Owner, In, Out]: ...
@overload
def batched(target: Callable[P, AsyncModel[In, Out]], /) -> Callable[P, Batcher[In, Out]]: ...
@overload
def batched(target: Callable[P, Model[In, Out]], /) -> Callable[P, Batcher[In, Out]]: ...
@overload
def batched(**options: Unpack[BatcherOptions]) -> Decorator: ...
def batched(target: Any = None, /, **options: Unpack[BatcherOptions]) -> Any:
    """Put a `Batcher` in the place of a function, a method or a class.

    A function from a list to a list becomes a `Batcher`: callers pass one item and await its answer. A
    method does the same on each instance, with a batcher for each. A class whose instances are called
    with a list gives, when it is made, a `Batcher` over the new instance.

    ```python
    @batched(max_items=32)
    async def embed(texts: list[str]) -> list[list[float]]: ...

    vector = await embed("hello")
    ```

    Takes the options of `Batcher`.

    Raises:
        UsageError: the target is none of these, or the options contradict each other.
    """
    if target is None:
        return partial(_decorate, options)
    return _decorate(options, target)


def _decorate(options: BatcherOptions, target: Any, /) -> Any:
    if isinstance(target, type):
        if not _takes(target.__call__, 2):
            raise UsageError(
                f"@batched on the class {target.__qualname__} needs a method __call__(self, items) that "
                "takes the list. Define it, or decorate the method itself."
            )
        return _batched_class(options, target)
    if isinstance(target, staticmethod | classmethod):
        raise UsageError("@batched goes below @staticmethod or @classmethod, next to the function.")
    if not callable(target):
        raise UsageError(f"@batched needs a function, a method or a class, not {target!r}.")
    if inspect.isfunction(target) and _takes(target, 2):
        return BatchedMethod[Any, Any, Any](target, options)
    if not _takes(target, 1):
        raise UsageError(
            "@batched needs a function of one list, or a method of self and one list; "
            f"{target!r} takes neither."
        )
    return Batcher(target, **options)


def _batched_class(options: BatcherOptions, cls: type) -> Callable[..., Batcher[Any, Any]]:
    def make(*args: Any, **kwargs: Any) -> Batcher[Any, Any]:
        return Batcher(cls(*args, **kwargs), **({"name": cls.__qualname__} | options))

    update_wrapper(make, cls, updated=())
    return make


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether *function* can be called with *count* positional arguments and no fewer."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Built without a signature, such as some C functions: taken at its word.
        return count == 1
    positional = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    required = sum(one.default is one.empty for one in positional)
    keyword_only = any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in parameters)
    return required == count and not keyword_only
