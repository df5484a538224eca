"""Floor 6. Registering an input: one streaming pass that checks every line and finds every chunk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from batchyard.errors import InputChanged, InvalidInput, LineError
from batchyard.service.intake.scan import Scan
from batchyard.service.intake.source import blocks, open_input, unreadable
from batchyard.service.intake.spans import ChunkSpan, IntakeRules, Registration

__all__ = ["ChunkSpan", "IntakeRules", "Registration", "register"]


def register(
    path: Path, rules: IntakeRules, *, on_progress: Callable[[int], None] | None = None
) -> Registration:
    """Check all of *path* and say where its chunks lie.

    *on_progress* is called now and then with the number of bytes read.

    Raises:
        InvalidInput: with every error found, in line order, up to `rules.max_errors`.
        UsageError: the file cannot be read.
        InputChanged: somebody wrote to it meanwhile.
    """
    handle = open_input(path)
    try:
        before = os.fstat(handle)
        scan = Scan(rules)
        digest = _hash_beside(handle, scan, on_progress)
        errors = scan.errors + scan.settle_duplicates(blocks(handle))
        after = os.fstat(handle)
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(handle)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InputChanged(f"{path} was written to while it was read. Try again once it is complete.")
    if scan.error_count:
        errors.sort(key=lambda one: one.line or 0)
        raise InvalidInput(errors[: rules.max_errors], scan.error_count)
    if not scan.total:
        message = f"{path} holds no request. Each line must be one request as a JSON object."
        raise InvalidInput([LineError("empty_file", message)])
    return Registration(
        path,
        before.st_size,
        before.st_mtime_ns,
        digest,
        scan.total,
        tuple(scan.chunks),
        tuple(scan.models),
        scan.endpoints,
    )


def _hash_beside(handle: int, scan: Scan, on_progress: Callable[[int], None] | None) -> str:
    """Feed the scan; the SHA-256 of the same blocks is computed in a thread meanwhile."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1, thread_name_prefix="batchyard-sha256") as thread:
        pending: Future[None] | None = None
        for block in blocks(handle, on_progress):
            # At most one block waits, so that memory stays bounded where hashing is the slower part.
            if pending is not None:
                pending.result()
            pending = thread.submit(digest.update, block)
            if not scan.full:
                scan.feed(block)
        if not scan.full:
            scan.end()
        scan.close_chunk()
    return digest.hexdigest()
