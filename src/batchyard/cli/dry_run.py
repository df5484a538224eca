"""Floor 9. `batchyard run --dry-run`: everything is checked and estimated, nothing is run."""

from __future__ import annotations

import asyncio
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from batchyard.cli.engines import EngineChoice, build_engine
from batchyard.cli.options import JobOptions
from batchyard.cli.prepare import Prepared, rules_for
from batchyard.cli.progress import duration
from batchyard.cli.report import ExitCode, Report
from batchyard.engines.protocol import Engine
from batchyard.errors import UsageError
from batchyard.events import EventBus
from batchyard.planning.estimate import Figure, Price, Source, cost, total_of_sample
from batchyard.service.intake.chunk import read_requests
from batchyard.service.intake.registration import Registration, register
from batchyard.types import Endpoint, Request

#: Requests whose tokens are counted; the rest is estimated from them.
_SAMPLE = 500
#: Characters a token, where no tokeniser is at hand.
_CHARACTERS_PER_TOKEN = 4.0
#: Output tokens of a request that names no limit, as a rough middle.
_OUTPUT_TOKENS = 128.0
#: Tokens a second, in and out, of the default models on two cores of a common server.
_ASSUMED_SPEED = {"llama": (420.0, 110.0), "onnx": (5500.0, 5500.0)}


class _Limits(msgspec.Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take."""

    input_tokens: Figure
    output_tokens: Figure
    seconds: Figure | None
    cost: Figure | None


def dry_run(
    options: JobOptions, prepared: Prepared, choice: EngineChoice, events: EventBus, report: Report
) -> int:
    """Check the input, count tokens, estimate time and cost."""
    price = _price(options.prices)
    engine = build_engine(choice, events)
    with tempfile.TemporaryDirectory(prefix="batchyard-") as folder:
        path = prepared.requests(Path(folder) / "requests.jsonl")
        model_given = choice.model is not None or choice.engine != "openai"
        rules = rules_for(engine.capabilities, prepared, model_given=model_given, limit=options.limit)
        found = register(path, rules)
        sample = _sample(path, found)
    counted: list[int | None] = [None] * len(sample)
    if choice.engine != "openai":
        counted = asyncio.run(_count(engine, sample))
    estimate = _estimate(choice.engine.partition(":")[0], found, sample, counted, price)
    _tell(report, options.source, found, estimate)
    return ExitCode.SUCCEEDED


def _price(text: str | None) -> Price | None:
    if text is None:
        return None
    given, _, made = text.partition("/")
    try:
        price = Price(float(given), float(made or 0))
        if not (0 <= price.input < math.inf and 0 <= price.output < math.inf):
            raise ValueError(text)  # noqa: TRY301 - told in the same words as what is no number
    except ValueError as error:
        raise UsageError(
            f"--price {text!r} is no price. Write the prices per million tokens, in and out, as 0.15/0.60."
        ) from error
    return price


def _sample(path: Path, found: Registration) -> list[Request]:
    """Requests drawn evenly over the whole input."""
    every = max(found.total // _SAMPLE, 1)
    sample: list[Request] = []
    with path.open("rb") as file:
        for span in found.chunks:
            wanted = [index for index in range(span.count) if (span.first_index + index) % every == 0]
            if wanted:
                file.seek(span.offset)
                requests = read_requests(file.read(span.length), span)
                sample += [requests[index] for index in wanted]
    return sample


async def _count(engine: Engine, sample: list[Request]) -> list[int | None]:
    try:
        await engine.start()
        return await engine.count_tokens(sample)
    finally:
        await engine.close()


def _estimate(
    engine: str, found: Registration, sample: list[Request], counted: list[int | None], price: Price | None
) -> Estimate:
    known = [count for count in counted if count is not None]
    if len(known) == len(sample):
        inputs = total_of_sample(known, found.total)
    else:
        guesses = [round(len(one.body) / _CHARACTERS_PER_TOKEN) for one in sample]
        rough = total_of_sample(guesses, found.total)
        inputs = Figure(rough.value, rough.low * 0.6, rough.high * 1.4, Source.ASSUMED)
    outputs = _outputs(found, sample)
    seconds = None
    if engine in _ASSUMED_SPEED:
        speed_in, speed_out = _ASSUMED_SPEED[engine]
        value = inputs.value / speed_in + outputs.value / speed_out
        seconds = Figure(value, value / 3, value * 3, Source.ASSUMED)
    return Estimate(inputs, outputs, seconds, cost(inputs, outputs, price) if price else None)


def _outputs(found: Registration, sample: list[Request]) -> Figure:
    making = [one for one in sample if one.endpoint is not Endpoint.EMBEDDINGS]
    if not making:
        return Figure(0, 0, 0, Source.MEASURED)
    limits = [_limit(one) for one in making]
    expected = [_OUTPUT_TOKENS if limit is None else min(_OUTPUT_TOKENS, limit) for limit in limits]
    most = [4 * _OUTPUT_TOKENS if limit is None else limit for limit in limits]
    scale = found.total / len(sample)
    return Figure(sum(expected) * scale, 0.1 * sum(expected) * scale, sum(most) * scale, Source.ASSUMED)


def _limit(request: Request) -> int | None:
    try:
        limits = msgspec.json.decode(request.body, type=_Limits)
    except msgspec.MsgspecError:
        return None
    return limits.max_completion_tokens or limits.max_output_tokens or limits.max_tokens


def _tell(report: Report, source: Path, found: Registration, estimate: Estimate) -> None:
    report.event(
        "run.estimate",
        total=found.total,
        models=list(found.models),
        endpoints=found.endpoints,
        **{name: value and asdict(value) for name, value in _parts(estimate).items()},
    )
    report.say("Input", f"{source} · {found.total:,} requests, all valid")
    report.say("Asks", ", ".join(f"{url} ×{count:,}" for url, count in found.endpoints.items()))
    if found.models:
        report.say("Models", ", ".join(found.models[:8]) + (", …" if len(found.models) > 8 else ""))
    report.say("Tokens in", _words(estimate.input_tokens))
    report.say("Tokens out", _words(estimate.output_tokens))
    if estimate.seconds is None:
        report.say("Time", "cannot be told before something has run; try it with --limit 50 first.")
    else:
        low, high = duration(estimate.seconds.low), duration(estimate.seconds.high)
        report.say(
            "Time", f"about {duration(estimate.seconds.value)} ({low} to {high}, {estimate.seconds.source})"
        )
    if estimate.cost is not None:
        paid = estimate.cost
        report.say("Cost", f"{paid.value:,.2f} ({paid.low:,.2f} to {paid.high:,.2f}; the price is given)")
    report.say("Dry run", "Nothing was run and nothing was written.")


def _parts(estimate: Estimate) -> dict[str, Figure | None]:
    return {
        "input_tokens": estimate.input_tokens,
        "output_tokens": estimate.output_tokens,
        "seconds": estimate.seconds,
        "cost": estimate.cost,
    }


def _words(figure: Figure) -> str:
    return f"{figure.value:,.0f} ({figure.low:,.0f} to {figure.high:,.0f}, {figure.source})"
