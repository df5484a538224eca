"""Floor 9. `batchyard serve`: from flags and `batchyard.toml` to a running server."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvicorn
import uvloop
from rich.console import Console

from batchyard.api.app import make_app
from batchyard.cli.engines import EngineChoice, build_engine, choose_engine, concurrency_of
from batchyard.cli.report import ExitCode, Report
from batchyard.cli.settings import ModelSettings, Settings, read_settings
from batchyard.cli.values import duration_s
from batchyard.clock import SystemClock
from batchyard.errors import EngineError, StoreError, UsageError
from batchyard.events import EventBus
from batchyard.scheduling.rate_limits import RateLimits
from batchyard.scheduling.scheduler import Policy
from batchyard.scheduling.tiers import Tiers
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.patient import LIVE_RETRY
from batchyard.service.hosting.pool import EnginePool
from batchyard.service.hosting.served import Served
from batchyard.service.hosting.shelf import Place
from batchyard.stores.object_blobs import open_blobs
from batchyard.types import Endpoint

_DRAIN_S = 30


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be served, where."""

    settings: Settings
    models: list[ModelSettings]
    without_keys: bool


def serve(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="A settings file. Default: batchyard.toml in this folder, where there is one."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port; 0 for any free one. Default: 8000.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where everything is kept. Default: batchyard-server.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Serve one model without a settings file: llama, onnx, openai or echo.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model of that engine, as for `run`.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Serve what an OpenAI-compatible server has, under --model.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call that model.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Dispatches in flight.")] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="BATCHYARD_DATABASE",
            help="The URL of a PostgreSQL database, to share the work with other servers on it.",
        ),
    ] = None,
    blobs: Annotated[
        str | None,
        typer.Option(
            envvar="BATCHYARD_BLOBS",
            help="Keep files and results there instead of in --state, such as s3://bucket/prefix.",
        ),
    ] = None,
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="Let everybody in on an address that others can reach.")
    ] = False,
) -> None:
    """Serve the OpenAI API, batches and files included, until interrupted.

    Everything is kept in the state folder: after a crash or a restart each batch goes on where it was.
    """
    report = Report(json_events=False, to_stderr=True)
    try:
        settings = read_settings(config)
        single = ModelSettings(
            name or model or (engine or "").partition(":")[0] or "",
            engine,
            model,
            base_url,
            concurrency=concurrency,
        )
        chosen = [single] if engine or model or base_url else settings.model or _default_models()
        given = {
            "host": host,
            "port": port,
            "state": None if state is None else str(state),
            "database": database,
            "blobs": blobs,
        }
        changed = {key: value for key, value in given.items() if value is not None}
        settings = msgspec.structs.replace(settings, **changed)
        code = _serve(_Asked(settings, chosen, without_keys), report)
    except (UsageError, EngineError, StoreError) as error:
        code = report.error(error, ExitCode.USAGE)
    except KeyboardInterrupt:
        code = 0
    raise typer.Exit(code)


def _default_models() -> list[ModelSettings]:
    return [ModelSettings("smollm2-135m-instruct", "llama"), ModelSettings("all-minilm-l6-v2", "onnx")]


def _served(name: str, members: Sequence[ModelSettings], settings: Settings, events: EventBus) -> Served:
    """One model; those that have the same name serve it together."""
    if not name:
        raise UsageError("The model needs a name that clients call it by. Give --name, or --model.")
    engines = []
    adaptive = False
    for one in members:
        endpoint = Endpoint.EMBEDDINGS if one.engine == "onnx" else None
        engine_name = choose_engine(one.engine, one.model, one.base_url, endpoint)
        choice = EngineChoice(
            engine_name, one.model, one.base_url, one.api_key_env, one.timeout_s, one.concurrency
        )
        engine = build_engine(choice, events)
        engines.append((engine, concurrency_of(choice, engine)))
        # How much somebody else's server takes is only known by asking.
        adaptive = adaptive or engine.capabilities.slots is None
    hedges = [duration_s(one.hedge_after, f"hedge_after of {name}") for one in members if one.hedge_after]
    first = (
        engines[0][0]
        if len(engines) == 1
        else EnginePool(engines, SystemClock(), hedge_after_s=min(hedges, default=None))
    )
    reserved = [one.reserve for one in members if one.reserve is not None]
    return Served(
        name,
        first,
        sum(room for _, room in engines),
        time.time(),
        adaptive=adaptive,
        reserve=sum(reserved) if reserved else None,
        ceiling_s=Tiers([one.tier() for one in settings.tier]).ceiling_s,
        policy=Policy(weights=settings.weights),
        rate=RateLimits(
            _sum([one.requests_per_minute for one in members]),
            _sum([one.tokens_per_minute for one in members]),
        ),
    )


def _sum(limits: Sequence[float | None]) -> float | None:
    """What all allow together; None where one of them allows anything."""
    known = [one for one in limits if one is not None]
    return sum(known) if len(known) == len(limits) else None


def _all_served(models: Sequence[ModelSettings], settings: Settings, events: EventBus) -> list[Served]:
    by_name: dict[str, list[ModelSettings]] = {}
    for one in models:
        by_name.setdefault(one.name, []).append(one)
    return [_served(name, members, settings, events) for name, members in by_name.items()]


def _serve(asked: _Asked, report: Report) -> int:
    settings = asked.settings
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    events = EventBus()
    report.listen(events)
    place = Place(
        Path(settings.state),
        settings.database,
        None if settings.blobs is None else partial(open_blobs, settings.blobs),
        settings.lease_s,
    )
    host = Host(
        place,
        _all_served(asked.models, settings, events),
        events=events,
        private_webhooks=settings.private_webhooks,
        tiers=Tiers([one.tier() for one in settings.tier]),
        live_retry=replace(LIVE_RETRY, max_attempts=settings.live_attempts),
    )
    keys = [one for one in host.keys.all() if one.revoked_at is None]
    if not _is_loopback(settings.host) and not keys and not asked.without_keys:
        where = f"--database {settings.database}" if settings.database else f"--state {settings.state}"
        raise UsageError(
            f"Others can reach {settings.host}, and no key has been made. Make one with "
            f"`batchyard keys create NAME {where}`, or say --without-keys."
        )
    app = make_app(host, open_access=not keys, public_url=settings.public_url)
    server = _Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )

    def told() -> None:
        port = server.servers[0].sockets[0].getsockname()[1]
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        for one in host.models.values():
            paths = ", ".join(sorted(path.removeprefix("/v1/") for path in one.engine.capabilities.endpoints))
            console.print(f"  {one.name}  {one.engine.name}, {one.concurrency} at once: {paths}, batches")
        console.print(f"State   {host.where}")
        console.print(f"Keys    {len(keys)} made" if keys else "Keys    none made, so none is asked for")
        console.print(
            f"Listening on http://{shown}:{port}/v1   (Ctrl-C stops; batches go on at the next start)"
        )

    server.on_started = told
    # What is there by now stays: no collection needs to look through it, and each is for more than the
    # 700 new objects that are little in a server.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # The server raises the signal again once it has stopped: by then everything is kept.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        return runner.run(_until_stopped(host, server))


async def _until_stopped(host: Host, server: _Server) -> int:
    await host.open()
    try:
        await server.serve()
    except SystemExit as ended:
        # The address is taken, or may not be used: the server has said so.
        raise UsageError(
            f"Cannot listen on {server.config.host}:{server.config.port}. "
            "Choose another --port, or stop what listens there."
        ) from ended
    finally:
        await host.close()
    return 0


class _Server(uvicorn.Server):
    """Tells when it listens."""

    on_started: Any = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self.on_started is not None:
            self.on_started()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
