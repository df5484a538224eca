"""Floor 6. Text made of a row: templates with placeholders of our own, and values as text.

Values are never taken for placeholders, and nothing in a template is evaluated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from batchyard.errors import UsageError

Row = Mapping[str, Any]

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
#: What `lookup` gives where a row has no such column.
ABSENT = object()


class RowError(Exception):
    """One row cannot be made into a request."""


class Template:
    """Text with `{column}` placeholders; `{{` and `}}` stand for braces, `{a.b}` looks into nested rows.

    Raises:
        UsageError: it is no template, or names no column.
    """

    def __init__(self, template: str) -> None:
        #: The columns named, in order, repeats included.
        self.columns: list[str] = []
        #: Text before each column, and after the last.
        self._texts: list[str] = []
        text, end = "", 0
        for match in _PLACEHOLDER.finditer(template):
            text += template[end : match.start()]
            end = match.end()
            if match[0] in {"{{", "}}"}:
                text += match[0][0]
            elif match[1] is None:
                raise UsageError(
                    f"The template has a single {match[0]!r} at character {match.start() + 1}. "
                    "Name a column as {column}; write {{ or }} for the brace itself."
                )
            elif not match[1].strip():
                raise UsageError("The template has an empty placeholder {}. Name a column, such as {text}.")
            else:
                self._texts.append(text)
                self.columns.append(match[1])
                text = ""
        self._texts.append(text + template[end:])
        if not self.columns:
            raise UsageError(
                "The template names no column, so every row would ask the same. "
                "Add a placeholder such as {text}."
            )

    def fill(self, row: Row) -> str:
        """The template with the columns of *row* in place of its placeholders.

        Empty cells become empty text, as long as one of them holds something.

        Raises:
            RowError: a column is missing, or all are empty.
        """
        values = [text_of(row, column) for column in self.columns]
        if not any(value and not value.isspace() for value in values):
            named = ", ".join(repr(one) for one in dict.fromkeys(self.columns))
            verb = "is" if len(set(self.columns)) == 1 else "are all"
            raise RowError(
                f"{named} {verb} empty, so there is nothing to ask. Fill in, or leave the row out."
            )
        # Every second piece is a value: text, value, text, value, text.
        made = [""] * (2 * len(values) + 1)
        made[::2], made[1::2] = self._texts, values
        return "".join(made)


def lookup(row: Row, column: str) -> Any:
    """The value of *column*, or of a path such as `user.name` in nested rows; else `ABSENT`."""
    if column in row:
        return row[column]
    found: Any = row
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return ABSENT
        found = found[part]
    return found


def text_of(row: Row, column: str) -> str:
    """The value of *column* as text; null is empty text, objects and arrays are JSON.

    Raises:
        RowError: the row has no such column, or it holds bytes.
    """
    found = lookup(row, column)
    if isinstance(found, str):
        return found
    if found is ABSENT:
        raise RowError(f"The row has no {column!r}. Add it, or leave the row out.")
    if found is None or (isinstance(found, float) and math.isnan(found)):
        return ""
    if isinstance(found, bytes):
        raise RowError(f"{column!r} holds bytes, not text. Decode them first.")
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, dict | list):
        return json.dumps(found, ensure_ascii=False, default=str)
    return str(found)


def some_text(row: Row, column: str) -> str:
    """The value of *column* as text that is more than white space.

    Raises:
        RowError: it is not, or the row has no such column.
    """
    text = text_of(row, column)
    if not text or text.isspace():
        raise RowError(
            f"{column!r} is empty, so there is nothing to embed. Fill it in, or leave the row out."
        )
    return text
