"""Whatever is submitted, cancelled, finished, failed and closed in whatever order: the invariants hold.

The machine plays callers, time and the batch function of one real `Batcher` on a clock that jumps, and keeps
a plain model beside it. The numbers are those of the invariants in the design notes.
"""

import asyncio
import math
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchyard import Batcher, BatcherClosed, DeadlineExceeded, ItemTooLarge, QueueFull
from batchyard.testing.virtual_loop import VirtualTimeLoop

TIERS = {"chat": 1.0, "bulk": 20.0}


@dataclass(eq=False)
class Item:
    """What the model knows of one submitted item."""

    number: int
    cost: int
    key: int
    tier: str | None
    priority: int
    deadline_s: float | None
    at: float
    place: int
    runs: int = 0
    future: asyncio.Future = field(init=False)
    cancelled_in_queue: bool = False

    @property
    def rank(self):
        wanted = TIERS[self.tier or "chat"]
        if self.deadline_s is not None:
            wanted = self.deadline_s if self.tier is None else min(wanted, self.deadline_s)
        return self.at + wanted - self.priority

    @property
    def class_(self):
        """Items with an equal class and cost are served in order of arrival."""
        return (self.key, self.tier, self.priority, self.deadline_s, self.cost)


@dataclass(eq=False)
class Call:
    """One call of the batch function that has not returned yet."""

    items: list
    end: asyncio.Future


options = st.fixed_dictionaries(
    {
        "max_items": st.integers(1, 5),
        "max_parallel": st.integers(1, 2),
        "on_error": st.sampled_from(["isolate", "all"]),
        "keyed": st.booleans(),
        "budget": st.none() | st.integers(3, 12),
        "padded": st.booleans(),
        "sizes": st.booleans(),
        "bound": st.none()
        | st.tuples(st.integers(1, 4), st.sampled_from(["block", "reject", "drop_oldest"])),
        "policy": st.sampled_from(["greedy", "threshold", "tcp_ack", "deadline", "adaptive"]),
        "max_wait_s": st.sampled_from([0.0, 0.0, 0.5]),
    }
)


class BatcherMachine(RuleBasedStateMachine):
    """The rules are what can happen to a batcher from outside."""

    def __init__(self):
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.items = []
        self.running = []
        self.closing = None
        self.batcher = None
        self.most_at_once = 0

    def let_run(self):
        """Let everything happen that needs no time."""

        async def passes():
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(passes())

    # -- the batch function ------------------------------------------------------------------------

    async def function(self, items):
        limits = self.options
        call = Call(items, self.loop.create_future())
        real = list(dict.fromkeys(items))
        # 2: a dispatch never exceeds what was allowed.
        assert len(real) <= limits["max_items"]
        assert limits["sizes"] or len(items) == len(real)
        if limits["sizes"]:
            assert len(items) in self.sizes
        if limits["keyed"]:
            assert len({item.key for item in real}) == 1
        if limits["budget"] is not None:
            cost = max(item.cost for item in items) * len(items) if limits["padded"] else 0
            cost = cost or sum(item.cost for item in items)
            assert cost <= limits["budget"]
        first = [item for item in real if item.runs == 0]
        assert first in ([], real)
        if first:
            self.check_order(first)
        for item in real:
            # 1 and 6: never a second time but after an error, never after it was cancelled in the queue.
            assert item.runs == 0 or (limits["on_error"] == "isolate" and item.future is not None)
            assert not item.cancelled_in_queue
            item.runs += 1
        self.running.append(call)
        self.most_at_once = max(self.most_at_once, len(self.running))
        assert len(self.running) <= limits["max_parallel"]
        try:
            await call.end
        finally:
            self.running.remove(call)
        return [("answer", item.number) for item in items]

    def in_queue(self):
        return [item for item in self.items if item.runs == 0 and not item.future.done()]

    def check_order(self, first):
        left = [item for item in self.in_queue() if item not in first]
        for item in left:
            # 4: nobody of the same class and cost is overtaken. (Items before a full, blocking queue
            # have not been let in yet, but they came later all the same.)
            assert not any(item.class_ == one.class_ and item.place < one.place for one in first)
        if self.options["budget"] is None and self.options["bound"] is None:
            # 3: by rank, so that a higher tier goes first and no tier starves.
            alike = [item.rank for item in left if not self.options["keyed"] or item.key == first[0].key]
            assert max(item.rank for item in first) <= min(alike, default=math.inf)

    # -- what can happen ---------------------------------------------------------------------------

    @initialize(options=options)
    def make(self, options):
        self.options = options
        self.sizes = (
            (1, options["max_items"])
            if options["max_items"] > 1 and options["sizes"]
            else (options["max_items"],)
        )
        if options["sizes"] and options["budget"] is not None:
            # Filling one up to the only size would cost more than the budget.
            self.sizes = tuple(sorted({1, *self.sizes}))
        bound = options["bound"] or (None, "block")
        self.batcher = Batcher(
            self.function,
            max_items=options["max_items"],
            max_parallel=options["max_parallel"],
            on_error=options["on_error"],
            key=(lambda item: item.key) if options["keyed"] else None,
            cost=None if options["budget"] is None else lambda item: item.cost,
            max_cost=options["budget"],
            padded=options["padded"],
            allowed_sizes=self.sizes if options["sizes"] else None,
            max_queue=bound[0],
            overflow=bound[1],
            policy=options["policy"],
            goal_s=4.0 if options["policy"] == "adaptive" else None,
            max_wait_s=options["max_wait_s"],
            tiers=TIERS,
        )

    @rule(
        count=st.integers(1, 6),
        cost=st.integers(0, 13),
        key=st.integers(0, 1),
        tier=st.none() | st.sampled_from(sorted(TIERS)),
        priority=st.integers(-2, 2),
        deadline_s=st.none() | st.sampled_from([0.5, 3.0, 30.0]),
        plain=st.booleans(),
        apart=st.booleans(),
    )
    def submit(self, *, count, cost, key, tier, priority, deadline_s, plain, apart):
        if plain:
            tier, priority, deadline_s = None, 0, None
        made = [
            Item(
                len(self.items) + i,
                cost,
                key,
                tier,
                priority,
                deadline_s,
                self.loop.time(),
                len(self.items) + i,
            )
            for i in range(count)
        ]

        async def main():
            for item in made:
                self.items.append(item)
                try:
                    item.future = self.batcher.submit(
                        item, tier=tier, priority=priority, deadline_s=deadline_s
                    )
                except BatcherClosed:
                    assert self.closing is not None
                    self.items.remove(item)
                if apart:
                    await asyncio.sleep(0)

        self.loop.run_until_complete(main())
        self.let_run()

    @precondition(lambda self: any(not item.future.done() for item in self.items))
    @rule(data=st.data())
    def cancel(self, data):
        item = data.draw(st.sampled_from([item for item in self.items if not item.future.done()]))
        item.cancelled_in_queue = item.runs == 0
        item.future.cancel()
        self.let_run()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        data.draw(st.sampled_from(self.running)).end.set_result(None)
        self.let_run()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data):
        data.draw(st.sampled_from(self.running)).end.set_exception(RuntimeError("the function's own"))
        self.let_run()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 7.0]))
    def tick(self, seconds):
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.let_run()

    @precondition(lambda self: self.closing is None)
    @rule(drain=st.booleans())
    def close(self, drain):
        if len(self.items) < 4:
            # Early closes teach little.
            return
        self.closing = self.loop.create_task(self.batcher.close(drain=drain))
        self.let_run()

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def counts_are_true(self):
        if self.batcher is None:
            return
        stats = self.batcher.stats
        ended = stats.completed + stats.failed + stats.cancelled + stats.expired + stats.dropped
        # 5: at every moment.
        assert stats.submitted == stats.waiting + stats.running + ended == len(self.items)
        assert stats.waiting == len(self.in_queue())
        done = [item.future for item in self.items if item.future.done() and not item.future.cancelled()]
        assert stats.completed == sum(future.exception() is None for future in done)
        assert stats.expired == sum(isinstance(future.exception(), DeadlineExceeded) for future in done)
        assert stats.dropped == sum(isinstance(future.exception(), QueueFull) for future in done)

    @invariant()
    def answers_find_their_callers(self):
        for item in self.items:
            future = item.future
            if not future.done() or future.cancelled():
                continue
            error = future.exception()
            if error is None:
                assert item.runs >= 1
                assert future.result() == ("answer", item.number)
            elif isinstance(error, DeadlineExceeded):
                # 6: what is too late is not computed.
                assert item.deadline_s is not None
                assert item.runs == 0
            elif isinstance(error, ItemTooLarge):
                assert item.cost * self.smallest_fill > self.options["budget"]
            else:
                assert isinstance(error, RuntimeError | QueueFull | BatcherClosed)

    @property
    def smallest_fill(self):
        return min(self.sizes) if self.options["sizes"] else 1

    @invariant()
    def nothing_waits_for_a_free_slot(self):
        if self.batcher is None:
            return
        holds = self.options["max_wait_s"] > 0 or self.options["policy"] in {
            "threshold",
            "tcp_ack",
            "deadline",
        }
        if not holds and len(self.running) < self.options["max_parallel"]:
            assert not self.in_queue()

    def teardown(self):
        if self.batcher is not None:

            async def to_the_end():
                closing = self.closing or asyncio.ensure_future(self.batcher.close())
                while not closing.done():
                    for call in list(self.running):
                        call.end.set_result(None)
                    await asyncio.sleep(0.001)
                await closing

            self.loop.run_until_complete(to_the_end())
            # 1: nothing is lost.
            assert all(item.future.done() for item in self.items)
            self.counts_are_true()
            self.answers_find_their_callers()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
