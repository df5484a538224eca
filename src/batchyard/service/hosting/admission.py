"""Floor 6. May these requests become a Batch here? An input against what is served and allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchyard.errors import InputChanged, InvalidInput, LineError, UsageError
from batchyard.service.hosting.keys import may_use
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.intake.registration import IntakeRules, Registration, register
from batchyard.stores.protocol import KeyRecord
from batchyard.types import Endpoint

#: Bytes of a request that are taken for a token until it is known.
_BYTES_A_TOKEN = 4


def tokens_of(found: Registration) -> int:
    """How many prompt tokens an input is taken to have."""
    return found.size_bytes // _BYTES_A_TOKEN


def check_input(
    shelf: Shelf, source: Path | None, settings: Mapping[str, Any], key: KeyRecord | None
) -> tuple[Registration, str | None]:
    """What is in *source*, and the model that is asked; None where there may be several. Blocks.

    Raises:
        InvalidInput: it cannot become a Batch with these settings, made with this key.
    """
    if source is None:
        message = f"Cannot find file {settings['input_file_id']}, or you have no access to it."
        raise InvalidInput([LineError("invalid_request", message, None, "file_id")])
    endpoint = Endpoint(settings["endpoint"])
    rules = IntakeRules(
        endpoints=frozenset([endpoint]), several_models=settings["several_models"], same_endpoint=True
    )
    try:
        found = register(source, rules)
    except (UsageError, InputChanged) as error:
        raise InvalidInput([LineError("invalid_request", str(error))]) from error
    most = shelf.limits.max_requests if settings["total"] is None else settings["total"]
    if found.total > most:
        message = f"The input holds {found.total:,} requests; a batch takes {most:,}. Split it."
        raise InvalidInput([LineError("too_many_tasks", message)])
    if key is not None and key.max_enqueued_tokens and tokens_of(found) > key.max_enqueued_tokens:
        message = (
            f"The input takes about {tokens_of(found):,} prompt tokens, and its key allows "
            f"{key.max_enqueued_tokens:,} to be enqueued. Split it."
        )
        raise InvalidInput([LineError("token_limit_exceeded", message)])
    if settings["several_models"]:
        return found, None
    return found, _only_model(shelf, found, endpoint, key)


def _only_model(shelf: Shelf, found: Registration, endpoint: Endpoint, key: KeyRecord | None) -> str:
    (model,) = found.models
    served = shelf.models.get(model)
    line = found.chunks[0].first_line
    if served is None or (key is not None and not may_use(key, model)):
        known = ", ".join(one for one in sorted(shelf.models) if key is None or may_use(key, one))
        message = f"The provided model {model!r} is not served here. Use one of: {known}."
        raise InvalidInput([LineError("model_not_found", message, line, "body.model")])
    if endpoint not in served.engine.capabilities.endpoints:
        message = f"The model {model!r} does not answer {endpoint.value}."
        raise InvalidInput([LineError("invalid_request", message, line, "url")])
    return served.name
