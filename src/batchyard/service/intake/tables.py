"""Floor 6. Reading tables row by row: JSONL, CSV, TSV and Parquet, each with bounded memory.

Knows how rows are stored, not what requests are made of them.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchyard.errors import UsageError
from batchyard.service.intake.source import MAX_LINE_BYTES, blocks, numbered_lines, open_input, unreadable

Row = Mapping[str, Any]

_BY_ENDING = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".parquet": "parquet", ".pq": "parquet"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    #: 1-based number of the row, bad rows counted, blank lines and the header not.
    row: int
    #: 1-based line where it starts; None where the format has no lines.
    line: int | None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read, and why, as a full sentence."""

    reason: str


Found = tuple[Place, Row | BadRow]


def sniff(path: Path) -> str:
    """What *path* holds: `requests`, `rows` (JSONL), `csv`, `tsv` or `parquet`.

    Decided by the ending, and for everything else by the first line that is not blank. What cannot be
    told counts as requests, so that its errors are told line by line.

    Raises:
        UsageError: the file cannot be read.
    """
    handle = open_input(path)
    try:
        if os.pread(handle, 4, 0) == b"PAR1":
            return "parquet"
        kind = _BY_ENDING.get(path.suffix.lower())
        if kind is not None:
            return kind
        first = _first_object(handle)
    finally:
        os.close(handle)
    return "rows" if first and not _is_request(first) else "requests"


def _is_request(first: dict[str, Any]) -> bool:
    # Columns may be called `url` or `body` too: only several members of a request in company say request.
    signs = len(first.keys() & {"custom_id", "method", "url"}) + isinstance(first.get("body"), dict)
    return signs >= 2 or ("custom_id" in first and first.keys() <= {"custom_id", "method", "url", "body"})


def _first_object(handle: int) -> dict[str, Any]:
    for _, raw in numbered_lines(blocks(handle), MAX_LINE_BYTES):
        if isinstance(raw, int):
            break
        if raw and not raw.isspace():
            try:
                return msgspec.json.decode(raw, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                break
    return {}


def read_rows(source: Path, columns: Callable[[list[str]], list[str]] | None = None) -> Iterator[Found]:
    """The rows of *source* in order.

    *columns* is told which columns a Parquet file has and answers which are needed.

    Raises:
        UsageError: the file cannot be read at all, or from some line on.
    """
    kind = sniff(source)
    match kind:
        case "csv" | "tsv":
            return _read_csv(source, "\t" if kind == "tsv" else None)
        case "parquet":
            return _read_parquet(source, columns)
        case _:
            return _read_jsonl(source)


def columns_of(source: Path) -> list[str]:
    """The columns of the first row that can be read, for messages and hints."""
    if sniff(source) == "parquet":
        with closing(_open_parquet(source)) as file:
            return [*file.schema_arrow.names]
    for _, row in read_rows(source):
        if not isinstance(row, BadRow):
            return [*row]
    return []


def _read_jsonl(source: Path) -> Iterator[Found]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    handle = open_input(source)
    number = 0
    try:
        for line, raw in numbered_lines(blocks(handle), MAX_LINE_BYTES):
            if isinstance(raw, bytes) and (not raw or raw.isspace()):
                continue
            number += 1
            place = Place(number, line)
            if isinstance(raw, int):
                yield place, BadRow(f"The line has {raw:,} bytes; the limit is {MAX_LINE_BYTES:,}.")
                continue
            try:
                yield place, decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                yield place, BadRow(f"This is not a JSON object in UTF-8 ({error}).")
            except RecursionError:
                yield place, BadRow("The JSON nests too deeply. Flatten it.")
    except OSError as error:
        raise unreadable(source, error) from error
    finally:
        os.close(handle)


def _read_csv(source: Path, delimiter: str | None) -> Iterator[Found]:
    # The standard limit of 131,072 characters a cell refuses ordinary documents. It is one for the whole
    # process, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    os.close(open_input(source))
    reader: Any = None
    with source.open(encoding="utf-8-sig", newline="") as file:
        try:
            lines = _bounded(file.readline, source)
            start = [*_until_text(lines)]
            if not start:
                return
            reader = csv.reader(
                itertools.chain(start, lines), delimiter=delimiter or _delimiter_of(start[-1]), strict=True
            )
            header = next(cells for cells in reader if cells)
            repeated = {name for name in header if header.count(name) > 1}
            if repeated:
                raise UsageError(f"{source} names the column {min(repeated)!r} twice. Rename one.")
            line, number = reader.line_num + 1, 0
            for cells in reader:
                if cells:
                    number += 1
                    place = Place(number, line)
                    if len(cells) == len(header):
                        yield place, dict(zip(header, cells, strict=True))
                    else:
                        yield place, BadRow(_ragged(len(cells), len(header)))
                line = reader.line_num + 1
        except UnicodeDecodeError as error:
            after = f" after line {reader.line_num}" if reader else ""
            raise UsageError(
                f"{source} is no UTF-8{after} (byte 0x{error.object[error.start]:02x}). Save it as UTF-8."
            ) from error
        except csv.Error as error:
            raise UsageError(f"{source}, line {reader.line_num}: {_csv_words(error)}") from error
        except OSError as error:
            raise unreadable(source, error) from error


def _bounded(read_line: Callable[[int], str], source: Path) -> Iterator[str]:
    number = 0
    while line := read_line(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(
                f"{source}, line {number}: the line is longer than {MAX_LINE_BYTES:,} characters."
            )
        yield line


def _ragged(cells: int, columns: int) -> str:
    return f"The row has {cells} cell{'' if cells == 1 else 's'}, the header has {columns}."


def _until_text(lines: Iterator[str]) -> Iterator[str]:
    """The first lines up to one that is not blank; none where all are blank."""
    blank = []
    for line in lines:
        blank.append(line)
        if line.strip("\r\n"):
            yield from blank
            return


def _delimiter_of(head: str) -> str:
    """A comma, unless the header has none and another usual separator instead."""
    return next((one for one in ",;\t" if one in head), ",")


def _csv_words(error: csv.Error) -> str:
    text = str(error)
    if "field larger" in text:
        return (
            f"a cell is longer than {MAX_LINE_BYTES:,} characters. "
            "Most likely a quotation mark is never closed."
        )
    if "unexpected end" in text:
        return "the file ends within a quoted cell. A quotation mark is never closed."
    return f"{text}. Quote cells that hold quotation marks, and double those marks."


def _open_parquet(source: Path) -> Any:
    os.close(open_input(source))
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra of its own
    except ModuleNotFoundError as error:
        raise UsageError(
            "Reading Parquet needs the package pyarrow. Install it with: pip install 'batchyard[parquet]'"
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(source)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{source} cannot be read as Parquet: {error}") from error


def _read_parquet(source: Path, columns: Callable[[list[str]], list[str]] | None) -> Iterator[Found]:
    with closing(_open_parquet(source)) as file:
        import pyarrow as pa  # noqa: PLC0415 - an extra of its own, and there since the file is open

        wanted = None if columns is None else columns(file.schema_arrow.names)
        number = 0
        try:
            for batch in file.iter_batches(batch_size=1000, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(number, None), row
        except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
            raise UsageError(f"{source} cannot be read as Parquet after row {number}: {error}") from error
