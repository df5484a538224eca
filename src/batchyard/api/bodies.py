"""Floor 8. JSON bodies: what they must be is said once, by types; what is wrong with one, in words.

The types also make the schemas of `/openapi.json`.
"""

from __future__ import annotations

import re
import typing
from typing import Any, TypeVar

import msgspec

from batchyard.api.errors import ApiError

T = TypeVar("T")

_WHERE = re.compile(r"(?s)(.*?)(?: - at (?:`(key)` in )?`\$(.*)`)?")
_MISSING = re.compile(r"Object missing required field `(.+?)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`")
_EXPECTED = re.compile(r"Expected `(.+?)`(?: of length)?(.*)", re.DOTALL)
_LIMIT = re.compile(r" (>=|<=|>|<) (-?[\d.]+)")
_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def read_as(body: bytes, kind: type[T]) -> T:
    """*body* as a *kind*, a `msgspec.Struct`.

    Raises:
        ApiError: it is none; with the parameter at fault.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise explained(str(error), parse_object(body), kind) from error


def explained(error: str, value: Any, kind: Any) -> ApiError:
    """What msgspec says of *value*, which is no *kind*, as an error for the client."""
    found = _WHERE.fullmatch(error)
    assert found is not None
    what, is_key, path = found[1], bool(found[2]), found[3] or ""
    if "[...]" in path or is_key:
        return _of_pair(what, value, path.partition("[")[0].strip("."), is_key=is_key)
    names = [one for one in re.split(r"\.|\[(\d+)\]", path) if one]
    name = ".".join(names)
    if missed := _MISSING.match(what):
        return missing(".".join([*names, missed[1]]))
    if unknown := _UNKNOWN.match(what):
        full = ".".join([*names, unknown[1]])
        return ApiError(400, f"Unknown parameter: '{full}'.", code="unknown_parameter", param=full)
    for one in names:
        value = value[int(one)] if isinstance(value, list) else value[one]
    if what.startswith("Invalid enum value"):
        allowed = ", ".join(repr(str(one)) for one in _allowed(kind, names))
        message = f"Invalid value: {value!r:.200}. Supported values are: {allowed}."
        return ApiError(400, message, code="invalid_value", param=name)
    return _of_value(what, value, name)


def _of_value(what: str, value: Any, name: str) -> ApiError:
    expected = _EXPECTED.match(what)
    if expected is None:
        return ApiError(400, f"Invalid '{name}': {what}.", code="invalid_value", param=name)
    kinds, rest = expected[1].split(" | "), expected[2]
    if limit := _LIMIT.match(rest):
        return _beyond(kinds[0], limit[1], limit[2], value, name)
    if rest.startswith(" matching regex"):
        message = f"Invalid value: {value!r:.200} has not the form that '{name}' must have."
        return ApiError(400, message, code="invalid_value", param=name)
    if value is None:
        return missing(name)
    if isinstance(value, float) and kinds == ["int"]:
        return wrong_type(name, "an integer", value)
    words = " or ".join(_NAMES.get(one, one) for one in kinds if one != "null")
    return wrong_type(name, words, value)


def _beyond(kind: str, sign: str, limit: str, value: Any, name: str) -> ApiError:
    end = {">=": "minimum", "<=": "maximum", ">": "minimum", "<": "maximum"}[sign]
    size = "below_min" if end == "minimum" else "above_max"
    if kind == "str":
        long = "short" if end == "minimum" else "long"
        message = (
            f"Invalid '{name}': string too {long}. Expected a string with {end} length {limit}, but got a "
            f"string with length {len(value)} instead."
        )
        return ApiError(400, message, code=f"string_{size}_length", param=name)
    if kind == "object":
        message = (
            f"Invalid '{name}': too many properties. Expected an object with at most {limit} properties, but "
            f"got an object with {len(value)} properties instead."
        )
        return ApiError(400, message, code="object_above_max_properties", param=name)
    if kind == "array":
        message = (
            f"Invalid '{name}': expected an array with {end} length {limit}, but got {len(value)} items."
        )
        return ApiError(400, message, code=f"array_{size}_length", param=name)
    message = f"Invalid '{name}': {value!r:.40} is not within its limits; the {end} is {limit}."
    return ApiError(400, message, code="invalid_value", param=name)


def _of_pair(what: str, value: Any, path: str, *, is_key: bool) -> ApiError:
    """What is wrong with a key or a value of an object whose keys are free, such as `metadata`."""
    for one in path.split(".") if path else []:
        value = value[one]
    limit = _LIMIT.search(what)
    for key, one in value.items():
        if is_key and limit is not None and len(key) > int(limit[2]):
            message = (
                f"Invalid property name in '{path}': {key[:80]!r} is too long. Expected a string with "
                f"maximum length {limit[2]}, but got a string with length {len(key)} instead."
            )
            return ApiError(400, message, code="property_name_above_max_length", param=path)
        if is_key:
            continue
        if limit is None and not isinstance(one, str):
            return wrong_type(f"{path}.{key}", "a string", one)
        if limit is not None and isinstance(one, str) and len(one) > int(limit[2]):
            return _beyond("str", limit[1], limit[2], one, f"{path}.{key}")
    return ApiError(400, f"Invalid '{path}': {what}.", code="invalid_value", param=path)


def _allowed(kind: Any, names: list[str]) -> list[Any]:
    """The values that the literal or enumeration at this place takes."""
    found = msgspec.inspect.type_info(kind)
    for name in names:
        found = next((one for one in _parts(found) if not isinstance(one, msgspec.inspect.NoneType)), found)
        if isinstance(found, msgspec.inspect.StructType):
            found = next(one.type for one in found.fields if one.encode_name == name)
        elif isinstance(found, msgspec.inspect.ListType):
            found = found.item_type
    for one in _parts(found):
        if isinstance(one, msgspec.inspect.LiteralType):
            return list(one.values)
        if isinstance(one, msgspec.inspect.EnumType):
            return [member.value for member in one.cls]
        if isinstance(one, msgspec.inspect.ListType):
            return _allowed(typing.cast("Any", one.item_type), [])
    return []


def _parts(found: Any) -> typing.Sequence[Any]:
    return found.types if isinstance(found, msgspec.inspect.UnionType) else [found]


def parse_object(body: bytes) -> dict[str, Any]:
    """*body* as a JSON object.

    Raises:
        ApiError: it is none.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"We could not parse the JSON body of your request: {error}."
        raise ApiError(400, message) from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body of your request must be a JSON object.")
    return value


def missing(name: str) -> ApiError:
    """The error of a parameter that is not there."""
    return ApiError(
        400, f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name
    )


def wrong_type(name: str, expected: str, found: Any) -> ApiError:
    """The error of a parameter of another type than *expected* (such as `a string`)."""
    message = f"Invalid type for '{name}': expected {expected}, but got {kind_of(found)} instead."
    return ApiError(400, message, code="invalid_type", param=name)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    return "an array" if isinstance(value, list) else "an object"
