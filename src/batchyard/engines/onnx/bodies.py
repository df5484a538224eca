"""Floor 3. Embedding requests and answers in the shape of the OpenAI API. Pure."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

#: The most inputs of one request, as in the OpenAI API.
MAX_INPUTS = 2048


class BadRequest(Exception):  # noqa: N818 - names what it is
    """The request itself is at fault.

    Args:
        param: the member of the body that is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What a body asks for."""

    inputs: list[str | list[int]]
    base64: bool
    dimensions: int | None


class _Body(msgspec.Struct):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode
_POWERS = 10.0 ** np.arange(23)


def read_body(body: bytes, *, width: int, dimensions: tuple[int, ...], vocabulary: int) -> EmbeddingRequest:
    """Check a body against what the model can do.

    Args:
        body: JSON.
        width: length of the model's vectors.
        dimensions: shorter lengths that they may be cut to.
        vocabulary: how many token ids the model knows.

    Raises:
        BadRequest: it asks for something else, said in one sentence.
    """
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"The body is not an embedding request: {error}.", "input") from error
    inputs = _inputs(found.input, vocabulary)
    wanted = found.dimensions
    if wanted == width:
        wanted = None
    if wanted is not None and wanted not in dimensions:
        can = ", ".join(map(str, (*dimensions, width)))
        raise BadRequest(f"This model gives no vectors of {wanted} dimensions, only of {can}.", "dimensions")
    return EmbeddingRequest(inputs, found.encoding_format == "base64", wanted)


def _inputs(given: str | list[str | int | list[int]], vocabulary: int) -> list[str | list[int]]:
    if isinstance(given, str):
        inputs: list[str | list[int]] = [given]
    elif given and all(isinstance(one, int) for one in given):
        inputs = [[one for one in given if isinstance(one, int)]]
    else:
        inputs = [one for one in given if not isinstance(one, int)]
        if len(inputs) != len(given):
            raise BadRequest('"input" mixes token ids with texts or lists. Give one kind.', "input")
    if not inputs:
        raise BadRequest('"input" is an empty list. Give at least one text.', "input")
    if len(inputs) > MAX_INPUTS:
        message = f'"input" has {len(inputs):,} texts; one request may have {MAX_INPUTS:,}. Split it.'
        raise BadRequest(message, "input")
    for place, one in enumerate(inputs):
        if not one:
            raise BadRequest(f'"input" {place} is empty. Give it some text, or leave it out.', "input")
        if not isinstance(one, str) and not (min(one) >= 0 and max(one) < vocabulary):
            message = f'"input" {place} holds a token id outside of 0 to {vocabulary - 1:,}.'
            raise BadRequest(message, "input")
    return inputs


def write_body(
    request: EmbeddingRequest, vectors: npt.NDArray[np.float32], tokens: int, model: str, cut: list[int]
) -> bytes:
    """The answer's body; *cut* names the inputs that were too long and were embedded in part."""
    if request.dimensions is not None:
        # Squares are summed in double, row by row: the same bits in every company.
        shorter = vectors[:, : request.dimensions]
        norms = np.sqrt(np.square(shorter, dtype=np.float64).sum(axis=1, keepdims=True))
        vectors = (shorter / np.maximum(norms, 1e-12)).astype(np.float32)
    written = (
        [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        if request.base64
        else _shortened(vectors)
    )
    data = [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(written)]
    body: dict[str, Any] = {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if cut:
        body["truncated"] = cut
    return _encode(body)


def _shortened(vectors: npt.NDArray[np.float32]) -> list[list[float]]:
    """Doubles that are written with nine digits at most and read back as the same float32.

    A float32 as a double would be written with seventeen. A double that is nearest to a whole number
    over a power of ten is written as just that, and both are exact here, up to 10^22.
    """
    exact = vectors.astype(np.float64)
    with np.errstate(divide="ignore"):
        after_point = np.clip(8 - np.floor(np.log10(np.abs(exact))), 0, len(_POWERS) - 1).astype(np.intp)
    power = _POWERS[after_point]
    short = np.rint(exact * power) / power
    # Values below 10^-14 have fewer than nine digits left: they stay as they are.
    kept: list[list[float]] = np.where(short.astype(np.float32) == vectors, short, exact).tolist()
    return kept
