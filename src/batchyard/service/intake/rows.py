"""Floor 6. Rows of a table become requests, with a template or a field; canonical JSONL is written."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from batchyard.errors import InvalidInput, LineError, UsageError
from batchyard.service.intake.diagnosis import MAX_CUSTOM_ID
from batchyard.service.intake.tables import BadRow, Found, Place, Row, columns_of, read_rows, sniff
from batchyard.service.intake.template import ABSENT, RowError, Template, lookup, some_text, text_of
from batchyard.stores.disk import as_store_error, sync_folder
from batchyard.types import Endpoint

__all__ = ["RowPlan", "columns_of", "convert_rows", "sniff"]

_MAX_ERRORS = 100
#: Rows that may pass before a column counts as missing: JSON rows leave out what they do not have.
_ROWS_TO_KNOW = 100
_HASH_BITS = (1 << 60) - 1
#: Members of a body that are made of the row, or that a Batch cannot have.
_NOT_PARAMS = ("messages", "input", "stream")


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """How a request is made of a row."""

    #: The user message, with `{column}` placeholders; `{{` and `}}` stand for braces.
    template: str | None = None
    #: The column to embed.
    field: str | None = None
    system: str | None = None
    #: More members of every body, such as `max_tokens`.
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: The column that holds the custom_id; otherwise rows are named `row-1`, `row-2` and so on.
    id_field: str | None = None

    def __post_init__(self) -> None:
        if (self.template is None) == (self.field is None):
            raise UsageError("Rows need either --template (for text) or --field (for embeddings), not both.")
        if self.field is not None and self.system is not None:
            raise UsageError("--system is for --template; embeddings have no system message.")
        for name in _NOT_PARAMS:
            if name in self.params:
                reason = "a Batch cannot stream" if name == "stream" else "it is made of the row"
                raise UsageError(f'--params may not hold "{name}": {reason}. Leave it out.')
        if self.template is not None:
            Template(self.template)  # refuses what is no template

    @property
    def endpoint(self) -> Endpoint:
        """What the requests ask for."""
        return Endpoint.CHAT if self.template is not None else Endpoint.EMBEDDINGS

    @property
    def columns(self) -> list[str]:
        """Every column that a row must have."""
        named = Template(self.template).columns if self.template is not None else []
        return [*named, *filter(None, (self.field, self.id_field))]


def convert_rows(source: Path, target: Path, plan: RowPlan) -> int:
    """Write a request for each row of *source* to *target*, as JSONL; returns how many.

    The file appears whole or not at all.

    Raises:
        UsageError: a column does not exist, or the format cannot be read.
        InvalidInput: with every row that cannot be made into a request, up to a cap.
        StoreError: the target cannot be written.
    """
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            conversion = _Conversion(source, plan)
            conversion.write(file)
            file.flush()
            os.fsync(file.fileno())
        conversion.settle_duplicates()
        if conversion.written and not conversion.failed:
            part.replace(target)
            sync_folder(target.parent)
    except OSError as error:
        raise as_store_error(error, target) from error
    finally:
        part.unlink(missing_ok=True)
    if conversion.failed:
        errors = sorted(conversion.errors, key=lambda one: one[0])
        raise InvalidInput([error for _, error in errors[:_MAX_ERRORS]], conversion.failed)
    if not conversion.written:
        message = f"{source} holds no row. It needs at least one."
        raise InvalidInput([LineError("empty_file", message)])
    return conversion.written


class _Conversion:
    """One pass over a table, and what was wrong with it."""

    def __init__(self, source: Path, plan: RowPlan) -> None:
        self._source = source
        self._plan = plan
        self._template = None if plan.template is None else Template(plan.template)
        self._url = plan.endpoint.value
        self._encode = msgspec.json.Encoder().encode
        self._seen: set[int] = set()
        self._repeated: set[int] = set()
        #: Row number and error, in the order found.
        self.errors: list[tuple[int, LineError]] = []
        self.failed = 0
        self.written = 0

    def write(self, file: IO[bytes]) -> None:
        """Write a request for each row that makes one."""
        rows = self._rows()
        first = [*itertools.islice(rows, _ROWS_TO_KNOW)]
        self._check_columns([row for _, row in first if not isinstance(row, BadRow)])
        for place, row in itertools.chain(first, rows):
            try:
                file.write(self._request(place, row))
                self.written += 1
            except RowError as error:
                self._refuse(place, "invalid_row", str(error))

    def settle_duplicates(self) -> None:
        """Read again, where hashes of ids met twice, to learn which ids really repeat."""
        if not self._repeated:
            return
        first: dict[str, Place] = {}
        listed = len(self.errors)
        for place, row in self._rows():
            try:
                custom_id = self._id(place, row)
            except RowError:
                continue
            if hash(custom_id) & _HASH_BITS not in self._repeated:
                continue
            earlier = first.setdefault(custom_id, place)
            if earlier is not place:
                where = f"row {earlier.row}" if earlier.line is None else f"line {earlier.line}"
                message = (
                    f"{self._plan.id_field!r} repeats {where} ({_short(custom_id)}). "
                    "Each row needs its own custom_id."
                )
                self._refuse(place, "duplicate_custom_id", message, room=listed + _MAX_ERRORS)

    def _rows(self) -> Iterator[Found]:
        return read_rows(self._source, self._needed)

    def _needed(self, existing: list[str]) -> list[str]:
        """The top-level columns that the plan looks at, so that a wide table is not read whole."""
        wanted = dict.fromkeys(
            one if one in existing else one.partition(".")[0] for one in self._plan.columns
        )
        missing = [one for one in wanted if one not in existing]
        if missing:
            raise self._no_column(missing[0], existing)
        return [*wanted]

    def _check_columns(self, rows: list[Row]) -> None:
        if not rows:
            return
        for column in self._plan.columns:
            if all(lookup(row, column) is ABSENT for row in rows):
                raise self._no_column(column, [*dict.fromkeys(name for row in rows for name in row)])

    def _no_column(self, column: str, existing: list[str]) -> UsageError:
        shown = ", ".join(map(repr, existing[:30])) + (", …" if len(existing) > 30 else "")
        return UsageError(f"{self._source} has no column {column!r}. Its columns are: {shown}.")

    def _refuse(self, place: Place, code: str, message: str, room: int = _MAX_ERRORS) -> None:
        self.failed += 1
        if len(self.errors) < room:
            text = message if place.line is not None else f"Row {place.row}: {message}"
            self.errors.append((place.row, LineError(code, text, place.line)))

    def _id(self, place: Place, row: Row | BadRow) -> str:
        if isinstance(row, BadRow):
            raise RowError(row.reason)
        column = self._plan.id_field
        if column is None:
            return f"row-{place.row}"
        custom_id = text_of(row, column)
        if not custom_id:
            raise RowError(f"{column!r} is empty, but each row needs its own custom_id.")
        if len(custom_id) > MAX_CUSTOM_ID:
            raise RowError(
                f"{column!r} has {len(custom_id):,} characters; a custom_id may have {MAX_CUSTOM_ID}."
            )
        return custom_id

    def _request(self, place: Place, row: Row | BadRow) -> bytes:
        plan = self._plan
        custom_id = self._id(place, row)
        assert not isinstance(row, BadRow)
        if plan.id_field is not None:
            key = hash(custom_id) & _HASH_BITS
            (self._repeated if key in self._seen else self._seen).add(key)
        if self._template is None:
            body: dict[str, Any] = {"input": some_text(row, plan.field or "")}
        else:
            messages = [{"role": "user", "content": self._template.fill(row)}]
            if plan.system is not None:
                messages.insert(0, {"role": "system", "content": plan.system})
            body = {"messages": messages}
        body.update(plan.params)
        try:
            line = self._encode({"custom_id": custom_id, "method": "POST", "url": self._url, "body": body})
        except UnicodeEncodeError as error:
            raise RowError("The row holds half of a surrogate pair, which is no text.") from error
        return line + b"\n"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")
