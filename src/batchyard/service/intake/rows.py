"""Floor 6. Rows of a table become requests: JSONL, CSV, TSV and Parquet, with a template or a field."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from batchyard.errors import InvalidInput, LineError, UsageError
from batchyard.stores.segments import as_store_error, sync_folder
from batchyard.types import Endpoint

Row = Mapping[str, Any]

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_MAX_ERRORS = 100
_BY_ENDING = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet"}


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

    @property
    def endpoint(self) -> Endpoint:
        """What the requests ask for."""
        return Endpoint.CHAT if self.template is not None else Endpoint.EMBEDDINGS


def sniff(path: Path) -> str:
    """What *path* holds: `requests`, `rows` (JSONL), `csv`, `tsv` or `parquet`.

    Decided by the ending, and for everything else by the first line that is not blank. What cannot be
    told counts as requests, so that its errors are told line by line.
    """
    kind = _BY_ENDING.get(path.suffix.lower())
    if kind is not None:
        return kind
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
        file.seek(0)
        for _ in range(1000):
            line = file.readline(1 << 20)
            if not line or line.strip():
                break
    try:
        first = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, RecursionError):
        return "requests"
    if isinstance(first, dict) and first and not {"custom_id", "body", "url"} & set(first):
        return "rows"
    return "requests"


def convert_rows(source: Path, target: Path, plan: RowPlan) -> int:
    """Write a request for each row of *source* to *target*, as JSONL; returns how many.

    The file appears whole or not at all.

    Raises:
        UsageError: a column does not exist, or the format cannot be read.
        InvalidInput: with every row that cannot be made into a request, up to a cap.
    """
    part = target.with_name(target.name + ".part")
    try:
        errors, failed, written = _write(source, part, plan)
        if not failed:
            part.replace(target)
            sync_folder(target.parent)
    except OSError as error:
        raise as_store_error(error, target) from error
    finally:
        part.unlink(missing_ok=True)
    if failed:
        raise InvalidInput(errors, failed)
    return written


def _write(source: Path, part: Path, plan: RowPlan) -> tuple[list[LineError], int, int]:
    """Write the requests; returns the errors up to a cap, how many there were, and how many were written."""
    errors: list[LineError] = []
    failed = written = 0
    with part.open("wb") as file:
        make: Callable[[int, Row], bytes] | None = None
        for number, row in _read(source):
            try:
                make = make or _maker(plan, row, source)
                file.write(make(number, row))
                written += 1
            except _RowError as error:
                failed += 1
                if len(errors) < _MAX_ERRORS:
                    errors.append(LineError("invalid_row", str(error), number))
        file.flush()
        os.fsync(file.fileno())
    return errors, failed, written


def columns_of(source: Path) -> list[str]:
    """The columns of the first row, for messages and hints."""
    for _, row in _read(source):
        return [*row]
    return []


class _RowError(Exception):
    """One row cannot be made into a request."""


class _BadRow(dict[str, Any]):
    """A row that could not be read."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


def _maker(plan: RowPlan, first: Row, source: Path) -> Callable[[int, Row], bytes]:
    """The function that makes a request line of a row; columns are checked against the first row."""
    if isinstance(first, _BadRow):
        raise _RowError(first.reason)
    used = [*_columns_in(plan.template or ""), *filter(None, (plan.field, plan.id_field))]
    for column in used:
        if _lookup(first, column) is _ABSENT:
            raise UsageError(
                f"{source} has no column {column!r}. Its columns are: {', '.join(map(str, first))}."
            )
    url = plan.endpoint.value
    encode = msgspec.json.Encoder().encode

    def make(number: int, row: Row) -> bytes:
        if isinstance(row, _BadRow):
            raise _RowError(row.reason)
        custom_id = f"row-{number}" if plan.id_field is None else _text(row, plan.id_field)
        if plan.field is not None:
            body: dict[str, Any] = {"input": _text(row, plan.field), **plan.params}
        else:
            prompt = fill(plan.template or "", row)
            messages = [{"role": "user", "content": prompt}]
            if plan.system is not None:
                messages.insert(0, {"role": "system", "content": plan.system})
            body = {"messages": messages, **plan.params}
        try:
            return encode({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + b"\n"
        except (UnicodeEncodeError, TypeError) as error:
            raise _RowError(f"The row holds text that is no Unicode ({error}).") from error

    return make


def fill(template: str, row: Row) -> str:
    """*template* with its placeholders replaced by the columns of *row*."""

    def replace(match: re.Match[str]) -> str:
        if match[0] in {"{{", "}}"}:
            return match[0][0]
        return _text(row, match[1])

    return _PLACEHOLDER.sub(replace, template)


def _columns_in(template: str) -> list[str]:
    columns = []
    for match in _PLACEHOLDER.finditer(template):
        if match[0] in {"{", "}"}:
            raise UsageError(
                f"The template has a single {match[0]!r} at character {match.start() + 1}. "
                "Name a column as {column}; write {{ or }} for the brace itself."
            )
        if match[1] is not None:
            if not match[1].strip():
                raise UsageError("The template has an empty placeholder {}. Name a column, such as {text}.")
            columns.append(match[1])
    if template and not columns:
        raise UsageError(
            "The template names no column, so every row would ask the same. Add a placeholder such as {text}."
        )
    return columns


_ABSENT = object()


def _lookup(row: Row, column: str) -> Any:
    """The value of *column*, or of a path such as `user.name` in nested rows."""
    if column in row:
        return row[column]
    found: Any = row
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _ABSENT
        found = found[part]
    return found


def _text(row: Row, column: str) -> str:
    found = _lookup(row, column)
    if found is _ABSENT:
        raise _RowError(f"The row has no {column!r}.")
    if found is None:
        raise _RowError(f"{column!r} is empty (null). Give it a value, or leave the row out.")
    if isinstance(found, str):
        return found
    if isinstance(found, dict | list):
        return json.dumps(found, ensure_ascii=False)
    return str(found)


def _read(source: Path) -> Iterator[tuple[int, Row]]:
    """Numbered rows, from 1; for text formats the number is that of the line where the row starts."""
    kind = _BY_ENDING.get(source.suffix.lower()) or sniff(source)
    match kind:
        case "csv":
            return _read_csv(source, ",")
        case "tsv":
            return _read_csv(source, "\t")
        case "parquet":
            return _read_parquet(source)
        case _:
            return _read_jsonl(source)


def _read_jsonl(source: Path) -> Iterator[tuple[int, Row]]:
    decode = msgspec.json.Decoder().decode
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                found = decode(line)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                yield number, _BadRow(f"This is not valid JSON ({error}).")
                continue
            yield number, found if isinstance(found, dict) else _BadRow("The row is no JSON object.")


def _read_csv(source: Path, delimiter: str) -> Iterator[tuple[int, Row]]:
    # The default limit of 131,072 characters a cell refuses ordinary documents.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with source.open(encoding="utf-8-sig", newline="", errors="strict") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if not header:
                return
            repeated = {name for name in header if header.count(name) > 1}
            if repeated:
                raise UsageError(f"{source} names the column {min(repeated)!r} twice. Rename one.")
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    if len(cells) == len(header):
                        yield line, dict(zip(header, cells, strict=True))
                    else:
                        yield line, _BadRow(f"The row has {len(cells)} cells, the header has {len(header)}.")
                line = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{source} is no UTF-8 after line {reader.line_num} "
                f"(byte 0x{error.object[error.start]:02x}). Save it as UTF-8."
            ) from error
        except csv.Error as error:
            raise UsageError(f"{source}, line {reader.line_num}: {error}.") from error


def _read_parquet(source: Path) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra of its own
    except ModuleNotFoundError as error:
        raise UsageError(
            "Reading Parquet needs the package pyarrow. Install it with: pip install 'batchyard[parquet]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{source} cannot be read as Parquet: {error}.") from error
