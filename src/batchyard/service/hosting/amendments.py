"""Floor 6. Amendments: what is changed about the requests of a Batch that have not run yet.

Pure. Fields of a body that no amendment names pass through byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from batchyard.types import Request

#: Fields of a body that hold what a model is asked, where text may be replaced.
_PROMPTS = ("messages", "prompt", "input", "instructions")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Amendment:
    """One change."""

    #: Merged into the body as RFC 7396 says: objects are merged, null removes, anything else replaces.
    body: Mapping[str, Any] = field(default_factory=dict)
    #: The model that is asked instead.
    model: str | None = None
    #: Text in prompts and what to write instead, one after the other.
    replace_text: Sequence[tuple[str, str]] = ()

    def record(self) -> dict[str, Any]:
        """As it is kept and shown."""
        kept: dict[str, Any] = {}
        if self.body:
            kept["body"] = dict(self.body)
        if self.model is not None:
            kept["model"] = self.model
        if self.replace_text:
            kept["replace_text"] = [{"find": old, "with": new} for old, new in self.replace_text]
        return kept

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Amendment:
        """What `record` gave."""
        pairs = [(one["find"], one["with"]) for one in record.get("replace_text", ())]
        return cls(record.get("body", {}), record.get("model"), pairs)

    def apply(self, request: Request) -> Request:
        """*request* as it is to be asked."""
        fields = _decode_fields(request.body)
        for name, value in self.body.items():
            if value is None:
                fields.pop(name, None)
            elif isinstance(value, dict):
                before = msgspec.json.decode(fields[name]) if name in fields else None
                fields[name] = _raw(_merged(before, value))
            else:
                fields[name] = _raw(value)
        for name in _PROMPTS if self.replace_text else ():
            if name in fields:
                fields[name] = _raw(self._replaced(msgspec.json.decode(fields[name])))
        model = request.model
        if self.model is not None:
            model = self.model
            fields["model"] = _raw(model)
        return replace(request, body=msgspec.json.encode(fields), model=model)

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            for old, new in self.replace_text:
                value = value.replace(old, new)
            return value
        if isinstance(value, list):
            return [self._replaced(one) for one in value]
        if isinstance(value, dict):
            return {name: self._replaced(one) for name, one in value.items()}
        return value


def amending(records: Sequence[Mapping[str, Any]]) -> Callable[[Request], Request] | None:
    """What the amendments of a Batch, as they are kept, make of a request; None where there are none."""
    amendments = [Amendment.of(one["change"]) for one in records]
    if not amendments:
        return None

    def amend(request: Request) -> Request:
        for one in amendments:
            request = one.apply(request)
        return request

    return amend


def _merged(before: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
