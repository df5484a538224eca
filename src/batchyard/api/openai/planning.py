"""Floor 8. Before a Batch is made, all of it ours: what it would be, and how much may be enqueued."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from math import ceil

from starlette.requests import Request
from starlette.responses import Response

from batchyard.api.access import Caller
from batchyard.api.bodies import read_as
from batchyard.api.errors import json_response
from batchyard.api.openai.batches import new_batch, write_inline
from batchyard.api.openai.shapes import (
    BatchError,
    BatchErrors,
    CapacityObject,
    CreateBatch,
    EstimateModel,
    EstimateObject,
)
from batchyard.api.operations import READS, Operation
from batchyard.api.reading import read_body
from batchyard.errors import InvalidInput
from batchyard.scheduling.demand import earliest, finishes
from batchyard.service.hosting.files import Incoming
from batchyard.service.hosting.host import Host, NewBatch

_MAX_BODY = 64 << 20


class PlanningApi:
    """Looks ahead."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        base = "/v1/batchyard"
        return [
            Operation(
                "POST",
                f"{base}/estimate",
                self.estimate,
                "Check a batch and estimate it, without making it",
                READS,
                body=CreateBatch,
                gives=EstimateObject,
            ),
            Operation(
                "GET",
                f"{base}/capacity",
                self.capacity,
                "How much is enqueued, and how much may be",
                READS,
                gives=CapacityObject,
            ),
        ]

    async def estimate(self, request: Request, caller: Caller) -> Response:
        """What `POST /v1/batches` with the same body would make."""
        host = self._host
        wanted = read_as(await read_body(request, _MAX_BODY), CreateBatch)
        batch = new_batch(wanted, caller)
        incoming: Incoming | None = None
        try:
            if wanted.requests is not None:
                incoming = host.files.begin()
                await asyncio.to_thread(write_inline, wanted, incoming)
                incoming.end()
            return json_response(await self._estimated(batch, incoming, caller))
        finally:
            if incoming is not None:
                incoming.discard()

    async def _estimated(self, batch: NewBatch, incoming: Incoming | None, caller: Caller) -> EstimateObject:
        host = self._host
        try:
            found = await host.look_ahead(caller.tenant, batch, incoming, caller.key)
        except InvalidInput as refused:
            errors = [BatchError(**asdict(error)) for error in refused.errors]
            return EstimateObject(
                valid=False,
                errors=BatchErrors(data=errors),
                requests=0,
                input_tokens=None,
                models=[],
                seconds=None,
                fits_window=None,
                earliest_window_seconds=None,
            )
        models = []
        for name in found.models:
            served = host.models.get(name)
            usable = served is not None and caller.may_use(name)
            rate = served.per_s if served is not None and usable else None
            models.append(EstimateModel(model=name, served=usable, requests_per_second=rate))
        seconds = fits = earliest_s = None
        rates = [(one.requests_per_second, one.model) for one in models]
        if rates and all(rate for rate, _ in rates):
            # The slowest of its models answers as if all requests were its own: an upper bound.
            rate, name = min((rate, name) for rate, name in rates if rate)
            now = host.clock.wall()
            jobs = [*host.jobs(name), (now + batch.window_s, float(found.total))]
            seconds = round(finishes(jobs, rate, now)[-1] - now, 3)
            fits = seconds <= batch.window_s
            earliest_s = ceil(earliest(jobs[:-1], float(found.total), rate, now) - now)
        return EstimateObject(
            valid=True,
            errors=None,
            requests=found.total,
            input_tokens=found.size_bytes // 4,
            models=models,
            seconds=seconds,
            fits_window=fits,
            earliest_window_seconds=earliest_s,
        )

    async def capacity(self, _: Request, caller: Caller) -> Response:
        """What the caller's tenant has enqueued, beside what the key allows."""
        there = await self._host.enqueued(caller.tenant)
        most_batches = None if caller.key is None else caller.key.max_batches
        most_tokens = None if caller.key is None else caller.key.max_enqueued_tokens
        return json_response(
            CapacityObject(
                batches=there.batches,
                requests=there.requests,
                tokens=there.tokens,
                max_batches=most_batches,
                max_enqueued_tokens=most_tokens,
                available_batches=None if most_batches is None else max(most_batches - there.batches, 0),
                available_tokens=None if most_tokens is None else max(most_tokens - there.tokens, 0),
            )
        )
