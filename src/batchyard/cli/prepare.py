"""Floor 9. What the input is, before anything is made of it: requests, or rows that become requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchyard.errors import InputChanged, UsageError
from batchyard.service.intake.registration import IntakeRules
from batchyard.service.intake.rows import RowPlan, columns_of, convert_rows, sniff
from batchyard.types import Capabilities, Endpoint


@dataclass(frozen=True, slots=True)
class Prepared:
    """An input that can be read, and how requests are made of it."""

    source: Path
    #: None where the input is request JSONL already.
    rows: RowPlan | None
    #: What the first request asks for; None where it does not say.
    endpoint: Endpoint | None

    def settings(self) -> dict[str, Any]:
        """What decides the requests, besides the input itself."""
        if self.rows is None:
            return {"rows": None, "source": None}
        found = self.source.stat()
        with self.source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "rows": msgspec.to_builtins(asdict(self.rows)),
            "source": {"path": str(self.source.resolve()), "bytes": found.st_size, "sha256": digest},
        }

    def check_unchanged(self, settings: Mapping[str, Any]) -> None:
        """Make sure that the rows are those the run was started with.

        Raises:
            InputChanged: they are not.
        """
        kept = settings.get("source")
        if kept is not None and kept["sha256"] != self.settings()["source"]["sha256"]:
            raise InputChanged(
                f"The content of {self.source} has changed since this run was started. "
                "Put the old content back, or start over with --restart."
            )

    def requests(self, target: Path) -> Path:
        """The request JSONL: the input itself, or *target* after the rows were written there.

        Raises:
            InvalidInput: rows cannot be made into requests.
        """
        if self.rows is None:
            return self.source.resolve()
        convert_rows(self.source, target, self.rows)
        return target


def prepare(source: Path, rows: RowPlan | None, *, row_options_given: bool) -> Prepared:
    """Look at the input and say what it is.

    Raises:
        UsageError: it cannot be read, or rows were given without a template.
    """
    if source.is_dir():
        raise UsageError(f"{source} is a folder. Name one file, such as {source / 'requests.jsonl'}.")
    if not source.exists():
        raise UsageError(f"The input {source} does not exist. Check the path.")
    if not source.is_file():
        raise UsageError(f"{source} is no regular file. A run reads its input again when it is resumed.")
    kind = sniff(source)
    if kind == "requests":
        if rows is not None or row_options_given:
            raise UsageError(
                f"{source} holds whole requests already, so --template, --field, --system, --params and "
                "--id-field have nothing to do. Leave them out."
            )
        return Prepared(source, None, _first_endpoint(source))
    if rows is None:
        raise UsageError(_how_to_use_rows(source))
    return Prepared(source, rows, rows.endpoint)


def rules_for(
    capabilities: Capabilities, prepared: Prepared, *, model_given: bool, limit: int | None
) -> IntakeRules:
    """What this engine accepts."""
    return IntakeRules(
        endpoints=capabilities.endpoints,
        several_models=capabilities.several_models,
        allow_missing_model=model_given or prepared.rows is not None,
        limit=limit,
    )


class _Url(msgspec.Struct):
    url: str


def _first_endpoint(source: Path) -> Endpoint | None:
    with source.open("rb") as file:
        for _ in range(100):
            line = file.readline(1 << 20)
            if not line:
                return None
            try:
                found = msgspec.json.decode(line.lstrip(b"\xef\xbb\xbf"), type=_Url)
                return Endpoint(found.url)
            except (ValueError, RecursionError, msgspec.MsgspecError):
                continue
    return None


def _how_to_use_rows(source: Path) -> str:
    columns = columns_of(source)
    named = f" with the columns {', '.join(map(repr, columns[:12]))}" if columns else ""
    example = columns[0] if columns else "text"
    return (
        f"{source} holds rows{named}, not requests. Say how to make a request of a row: "
        f"--template 'Summarise: {{{example}}}' for text, or --field {example} for embeddings."
    )
