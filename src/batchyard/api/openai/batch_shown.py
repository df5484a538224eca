"""Floor 8. A Batch as the API shows it."""

from __future__ import annotations

from batchyard.api.openai.shapes import (
    BatchError,
    BatchErrors,
    BatchObject,
    BatchUsage,
    Canary,
    InputDetails,
    OutputDetails,
    RequestCounts,
    Saved,
)
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.reader import BatchCounts
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.protocol import BatchRecord


async def show(host: Host, batch: BatchRecord) -> BatchObject:
    """*batch* with what became of its requests so far."""
    return shown(batch, await host.counts(batch), host.reader.note(batch))


def shown(batch: BatchRecord, counts: BatchCounts, note: str | None) -> BatchObject:
    """*batch* as the API shows it."""
    status, settings = Status(batch.status), batch.settings
    ended = {one: None if status is not one else _at(batch.ended_at) for one in TERMINAL}
    usage = counts.usage
    errors = [BatchError(**one) for one in batch.errors]
    canary = settings.get("canary")
    return BatchObject(
        id=batch.id,
        endpoint=settings["endpoint"],
        model=batch.model,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=settings["input_file_id"],
        completion_window=settings["completion_window"],
        status=status.value,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(batch.created_at),
        in_progress_at=_at(batch.in_progress_at),
        expires_at=_at(batch.deadline_at),
        finalizing_at=_at(batch.finalizing_at),
        completed_at=ended[Status.COMPLETED],
        failed_at=ended[Status.FAILED],
        expired_at=ended[Status.EXPIRED],
        cancelling_at=_at(batch.cancelling_at),
        cancelled_at=ended[Status.CANCELLED],
        request_counts=RequestCounts(
            total=counts.total,
            completed=counts.completed,
            failed=counts.failed,
            never_ran=counts.never_ran,
        ),
        usage=BatchUsage(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputDetails(usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.input_tokens + usage.output_tokens,
        ),
        metadata=settings["metadata"],
        priority=batch.priority,
        waiting_for=note,
        amendments=[dict(one) for one in batch.amendments],
        canary=Canary(canary["first"], canary["max_failed_share"]) if canary else None,
        retry_of=settings.get("retry_of"),
        saved=_saved(batch, counts),
    )


def _saved(batch: BatchRecord, counts: BatchCounts) -> Saved | None:
    """What stopping a Batch has saved, going by the requests that had run."""
    if not counts.never_ran:
        return None
    ran = counts.completed + counts.failed
    stopped_at = batch.cancelling_at or batch.ended_at
    tokens = seconds = None
    if ran:
        tokens = counts.never_ran * (counts.usage.input_tokens + counts.usage.output_tokens) // ran
        if batch.in_progress_at is not None and stopped_at is not None:
            seconds = round(counts.never_ran * max(stopped_at - batch.in_progress_at, 0.0) / ran, 3)
    return Saved(requests=counts.never_ran, tokens=tokens, seconds=seconds)


def _at(value: float | None) -> int | None:
    return None if value is None else int(value)
