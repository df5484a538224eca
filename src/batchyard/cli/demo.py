"""Floor 9. `batchyard demo`: the main job on real texts with both embedded models, then what to type next."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterator
from importlib.resources import as_file, files
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from batchyard.batching.packing import padding_ratio
from batchyard.cli.engines import EngineChoice
from batchyard.cli.job import run_job
from batchyard.cli.options import JobOptions
from batchyard.cli.report import ExitCode
from batchyard.scheduling.order import OrderName
from batchyard.service.intake.rows import RowPlan
from batchyard.service.join import Order

_console = Console(highlight=False, soft_wrap=True)
_TITLE = "Write a title of at most eight words for this text. Answer with the title only.\n\n{text}"
_SUMMARY = "Summarise this text in one short sentence.\n\n{text}"
_FIELDS = "Give this text a short title and say whether its tone is good or bad. Answer in JSON.\n\n{text}"
_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "tone": {"type": "string", "enum": ["good", "bad", "neutral"]},
    },
    "required": ["title", "tone"],
    "additionalProperties": False,
}
#: What a batcher that pads would use: texts a batch, in the order they come.
_PADDED_BATCH = 32


def demo(
    *,
    folder: Annotated[
        Path, typer.Option(help="Where the results go. What an earlier demo left there is replaced.")
    ] = Path("batchyard-demo"),
    texts: Annotated[int, typer.Option(min=1, max=18, help="How many texts the language model reads.")] = 8,
) -> None:
    """Answer a real file of texts with the embedded models: all are embedded, a few are written about.

    Needs no account, no database and no GPU. The first time it fetches two small models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("batchyard.cli") / "demo_data" / "texts.jsonl") as source:
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        _console.print(
            f"\n[bold]1. Embeddings[/] of all {len(rows)} texts, by a small embedding model on this machine\n"
        )
        vectors_path = folder / "embeddings.jsonl"
        code = run_job(lambda: _options(source, vectors_path, RowPlan(field="text", id_field="id")))
    if code:
        raise typer.Exit(code)
    _console.print(
        f"\n[bold]2. Titles, summaries and JSON[/] for {texts} of them, by a language model of 135 million "
        "parameters on this machine\n"
    )
    requests_path, answers_path = folder / "requests.jsonl", folder / "answers.jsonl"
    requests_path.write_text("".join(map(_line, _requests(rows, texts))), encoding="utf-8")
    code = run_job(lambda: _options(requests_path, answers_path, None))
    if code not in {ExitCode.SUCCEEDED, ExitCode.SOME_FAILED}:
        raise typer.Exit(code)
    _show(rows, vectors_path, answers_path)
    raise typer.Exit(code)


def _options(source: Path, output: Path, rows: RowPlan | None) -> JobOptions:
    return JobOptions(
        source=source,
        output=output,
        errors=None,
        choice=EngineChoice(""),
        rows=rows,
        row_options_given=False,
        limit=None,
        order=Order.INPUT,
        work_order=OrderName.AUTO,
        dedupe=None,
        deadline_s=None,
        canary=None,
        dry_run=False,
        prices=None,
        restart=True,
        json_events=False,
    )


def _requests(rows: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """For each chosen text a title, a summary, and an object by schema, as OpenAI batch requests."""
    fitting = [row for row in rows if row["id"].startswith(("note", "aesop"))]
    chosen = fitting[:: max(len(fitting) // count, 1)][:count]
    response_format = {"type": "json_schema", "json_schema": {"name": "text", "schema": _SCHEMA}}
    for row in chosen:
        for task, template, more in (
            ("title", _TITLE, {"max_tokens": 24}),
            ("summary", _SUMMARY, {"max_tokens": 60}),
            ("fields", _FIELDS, {"max_tokens": 60, "response_format": response_format}),
        ):
            prompt = template.replace("{text}", row["text"])
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "seed": 1, **more}
            yield {
                "custom_id": f"{row['id']}:{task}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"


def _results(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="ascii") as file:
        for line in file:
            found = json.loads(line)
            yield found["custom_id"], found["response"]["body"]


def _show(rows: list[dict[str, Any]], vectors_path: Path, answers_path: Path) -> None:
    by_id = {row["id"]: row for row in rows}
    written = {
        custom_id: body["choices"][0]["message"]["content"].strip()
        for custom_id, body in _results(answers_path)
    }
    _console.print("\n[bold]What came back[/]\n")
    for key in list(dict.fromkeys(custom_id.rpartition(":")[0] for custom_id in written))[:3]:
        row = by_id[key]
        _console.print(f"  [dim]{escape(row['author'])}: “{escape(_cut(row['text'], 100))}”[/]")
        for task in ("title", "summary", "fields"):
            if f"{key}:{task}" in written:
                _console.print(f"    {task:<8} {escape(_cut(written[f'{key}:{task}'], 160))}")
        _console.print()
    _console.print(f"  {_padding(vectors_path)}\n")
    _console.print("  The two texts that are closest in meaning, by their embeddings:")
    first, second, likeness = _closest({key: _vector(body) for key, body in _results(vectors_path)})
    for key in (first, second):
        row = by_id[key]
        _console.print(f"    [dim]{escape(row['author'])}: “{escape(_cut(row['text'], 100))}”[/]")
    _console.print(f"    cosine {likeness:.2f}\n")
    _console.print(
        "A model of 135 million parameters writes fluently and errs often: it shows the machinery, "
        "not what a language model can do. Name a better one with --model (any .gguf file) "
        "or --base-url (any server).\n"
    )
    _console.print("[bold]Next[/]")
    _console.print(
        f"  batchyard run {answers_path.with_name('requests.jsonl')} -o mine.jsonl --model ./better.gguf\n"
        "  batchyard run table.csv --template 'Classify: {text}' -o out.jsonl\n"
        "  batchyard run --help"
    )


def _padding(vectors_path: Path) -> str:
    """What length-aware packing saved, from the tokens that each text really took."""
    lengths = [body["usage"]["prompt_tokens"] for _, body in _results(vectors_path)]
    arrival = [
        tuple(range(start, min(start + _PADDED_BATCH, len(lengths))))
        for start in range(0, len(lengths), _PADDED_BATCH)
    ]
    return (
        f"Padding: 0 % of {sum(lengths):,} embedded tokens. Batches of {_PADDED_BATCH} in the order of the "
        f"file would have computed {padding_ratio(lengths, arrival):.1f} times as many."
    )


def _vector(body: dict[str, Any]) -> array[float]:
    found = body["data"][0]["embedding"]
    vector = array("f")
    if isinstance(found, str):
        vector.frombytes(base64.b64decode(found))
    else:
        vector.extend(found)
    return vector


def _closest(vectors: dict[str, array[float]]) -> tuple[str, str, float]:
    """The pair with the highest cosine."""
    norms = {key: sqrt(sum(one * one for one in vector)) for key, vector in vectors.items()}
    keys = list(vectors)
    likeness, first, second = max(
        (
            sum(a * b for a, b in zip(vectors[one], vectors[other], strict=True))
            / (norms[one] * norms[other]),
            one,
            other,
        )
        for place, one in enumerate(keys)
        for other in keys[place + 1 :]
    )
    return first, second, likeness


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
