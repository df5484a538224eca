"""Floor 9. `batchyard run`: what the options mean. `job` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchyard.cli.engines import EngineChoice
from batchyard.cli.job import run_job
from batchyard.cli.options import JobOptions
from batchyard.cli.values import canary_policy, duration_s, json_object
from batchyard.scheduling.order import OrderName
from batchyard.service.intake.rows import RowPlan
from batchyard.service.join import Order


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="OpenAI batch JSONL, or rows (JSONL, CSV, TSV, Parquet) with --template or --field.",
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where results go. Default: INPUT with .results.jsonl as ending."
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(help="Where failed requests go. Default: OUTPUT with .errors.jsonl as ending."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="llama, onnx, openai, or echo (with a script, such as echo:latency=20ms). "
            "Default: openai with --base-url, else onnx for embeddings and llama for the rest."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="llama: a .gguf file, a catalogue name, package:… or hf:owner/repo/file.gguf. "
            "onnx: a catalogue name or a folder. openai: replaces the model that requests name."
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(help="The environment variable that holds the server's API key.")
    ] = "OPENAI_API_KEY",
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Dispatches in flight. Default: what the engine can take, else 64."),
    ] = None,
    timeout: Annotated[str, typer.Option(help="The longest that one attempt may take, such as 90s.")] = "10m",
    template: Annotated[
        str | None, typer.Option(help="The prompt made of each row, such as 'Classify: {text}'.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="The column to embed, one embedding a row.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message for every row.")] = None,
    params: Annotated[
        str | None,
        typer.Option(help="More parameters for every row's request, as JSON: '{\"max_tokens\": 64}'."),
    ] = None,
    id_field: Annotated[
        str | None, typer.Option(help="The column that names each row. Default: row-1, row-2 and so on.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run the first N requests only.")] = None,
    order: Annotated[Order, typer.Option(help="The order of the output lines.")] = Order.INPUT,
    work_order: Annotated[
        OrderName,
        typer.Option(help="The order of work: prefix keeps prompts that begin alike together."),
    ] = OrderName.AUTO,
    dedupe: Annotated[
        bool | None,
        typer.Option(
            help="Ask what is alike to the byte once: all or nothing. Default: embeddings and temperature 0."
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(help="End by then, such as 2h; what is unfinished is written as batch_expired."),
    ] = None,
    fail_over: Annotated[
        str | None,
        typer.Option(help="Stop early when more of the first requests fail: 5% (of 100) or 5%/500."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, count tokens, estimate; run nothing.")
    ] = False,
    prices: Annotated[
        str | None,
        typer.Option("--price", help="Prices per million tokens for --dry-run, in and out: 0.15/0.60."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget what an earlier run did, and overwrite its results.")
    ] = False,
    json_events: Annotated[
        bool, typer.Option("--json", help="Print machine-readable events, one JSON object a line.")
    ] = False,
) -> None:
    """Answer a file of requests. The same command again goes on where it stopped.

    Ends with 0 when all succeeded, 1 when some failed, 2 for bad usage or input, 3 when it was
    interrupted and can be resumed.
    """
    raise typer.Exit(
        run_job(
            lambda: JobOptions(
                source=source,
                output=output or source.parent / f"{source.stem}.results.jsonl",
                errors=errors,
                choice=EngineChoice(
                    engine or "",
                    model,
                    base_url,
                    api_key_env,
                    duration_s(timeout, "--timeout"),
                    concurrency,
                ),
                rows=RowPlan(
                    template=template,
                    field=field,
                    system=system,
                    params=json_object(params, "--params") if params is not None else {},
                    id_field=id_field,
                )
                if template or field
                else None,
                row_options_given=bool(system or params or id_field),
                limit=limit,
                order=order,
                work_order=work_order,
                dedupe=dedupe,
                deadline_s=duration_s(deadline, "--deadline") if deadline is not None else None,
                canary=canary_policy(fail_over) if fail_over is not None else None,
                dry_run=dry_run,
                prices=prices,
                restart=restart,
                json_events=json_events,
            )
        )
    )
