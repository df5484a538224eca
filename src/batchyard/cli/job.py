"""Floor 9. One `batchyard run`, from options to exit code: prepare, resume or create, work, finish, tell."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from batchyard.cli.dry_run import dry_run
from batchyard.cli.engines import EngineChoice, build_engine, choose_engine, concurrency_of
from batchyard.cli.options import JobOptions
from batchyard.cli.prepare import Prepared, prepare, rules_for
from batchyard.cli.progress import Snapshot
from batchyard.cli.report import ExitCode, Report
from batchyard.engines.protocol import Engine
from batchyard.errors import (
    BatchyardError,
    EngineError,
    InputChanged,
    InvalidInput,
    StorageFull,
    StoreError,
    UsageError,
)
from batchyard.events import EventBus
from batchyard.service.batches import BatchService, ended
from batchyard.service.join import Joined
from batchyard.service.work_plan import Stop, WorkPlan
from batchyard.service.worker import Worker
from batchyard.stores.protocol import BatchRecord

#: Files that a run needs open besides one connection for each dispatch in flight.
_SPARE_FILES = 128
_REFRESH_S = 0.2


def run_job(make_options: Callable[[], JobOptions]) -> int:
    """Run, and turn every error that we raise on purpose into words and an exit code."""
    report = Report(json_events="--json" in sys.argv)
    try:
        options = make_options()
        report = Report(json_events=options.json_events)
        return Job(options, report).run()
    except InvalidInput as error:
        return report.refused(error)
    except StorageFull as error:
        return report.error(error, ExitCode.INTERRUPTED)
    except (UsageError, InputChanged, EngineError, StoreError) as error:
        return report.error(error, ExitCode.USAGE)
    except KeyboardInterrupt:
        return report.error(BatchyardError("Interrupted before anything ran."), ExitCode.INTERRUPTED)


class Job:
    """One run of the command."""

    def __init__(self, options: JobOptions, report: Report) -> None:
        self.options = options
        self.report = report
        self.events = EventBus()
        report.listen(self.events)

    def run(self) -> int:
        """Do everything; returns the exit code."""
        options = self.options
        _check_paths(options)
        prepared = prepare(options.source, options.rows, row_options_given=options.row_options_given)
        chosen = options.choice
        name = choose_engine(chosen.engine or None, chosen.model, chosen.base_url, prepared.endpoint)
        choice = replace(chosen, engine=name)
        if options.dry_run:
            return dry_run(options, prepared, choice, self.events, self.report)
        with self._open() as service:
            try:
                return self._run(service, prepared, choice)
            except (InvalidInput, UsageError, EngineError):
                # Nothing was ever accepted here: leave no folder behind.
                service.remove_if_empty()
                raise

    def _open(self) -> BatchService:
        try:
            return BatchService(self.options.state_path, events=self.events)
        except StoreError:
            if not self.options.restart:
                raise
            # What is damaged is to be forgotten anyway. A folder that is locked or not ours refuses again.
            return BatchService(self.options.state_path, fresh=True, events=self.events)

    def _run(self, service: BatchService, prepared: Prepared, choice: EngineChoice) -> int:
        options = self.options
        settings = {**choice.settings(), "limit": options.limit, **prepared.settings()}
        batch = None if options.restart else service.latest()
        if batch is not None:
            _check_same(batch, settings)
            prepared.check_unchanged(batch.settings)
            if ended(batch):
                if prepared.rows is None:
                    service.check_input(batch.id)
                return self.report.ended_before(batch, service.counts(batch.id))
        may_replace = options.restart or (batch is not None and batch.settings.get("replace"))
        if not may_replace:
            for path in (options.output, options.error_path):
                _check_free(path, service)
        engine = build_engine(choice, self.events)
        if batch is None:
            path = prepared.requests(service.folder.new_requests())
            model_given = _names_model(choice)
            rules = rules_for(engine.capabilities, prepared, model_given=model_given, limit=options.limit)
            batch = service.create(path, rules, {**settings, "replace": options.restart})
            self.report.created(batch)
        else:
            finished = service.finished(batch.id)
            self.report.resumed(batch, finished.succeeded + finished.failed)
        return self._until_joined(service, batch, choice)

    def _until_joined(self, service: BatchService, batch: BatchRecord, choice: EngineChoice) -> int:
        """Work and join; once more where results turned out to be damaged on the disk."""
        options = self.options
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            while True:
                engine = build_engine(choice, self.events)
                concurrency = _fit_open_files(concurrency_of(choice, engine))
                stop = runner.run(self._work(service, batch, engine, concurrency))
                if stop is not None:
                    kept = self._partial(service, batch.id)
                    counts = service.finished(batch.id)
                    return self.report.stopped(stop, service.get(batch.id), counts, kept)
                joined = service.finish(batch.id, options.output, options.error_path, options.order)
                if joined is not None:
                    return self.report.finished(joined, service.get(batch.id), service.counts(batch.id))
                self.report.damaged(batch.total - service.finished(batch.id).succeeded)

    async def _work(
        self, service: BatchService, batch: BatchRecord, engine: Engine, concurrency: int
    ) -> Stop | None:
        options = self.options
        plan = WorkPlan(
            concurrency=concurrency,
            canary=options.canary,
            order=options.work_order,
            dedupe=options.dedupe,
            deadline_at=service.clock.wall() + options.deadline_s if options.deadline_s else None,
        )
        try:
            await engine.start()
            self.report.started(engine, concurrency)
            drawing: list[asyncio.Task[None]] = []
            loop = asyncio.get_running_loop()

            def on_worker(worker: Worker) -> None:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self._interrupted, worker)
                drawing.append(loop.create_task(self._draw(worker, batch, plan.deadline_at)))

            try:
                return await service.work(batch.id, engine, plan, on_worker=on_worker)
            finally:
                for task in drawing:
                    task.cancel()
                await asyncio.gather(*drawing, return_exceptions=True)
        finally:
            await engine.close()

    def _interrupted(self, worker: Worker) -> None:
        if self.report.interrupting:
            # The second time: results are with the kernel already, so nothing finished is lost.
            os._exit(ExitCode.INTERRUPTED)
        self.report.interrupting = True
        worker.stop("interrupted", "Interrupted.")

    async def _draw(self, worker: Worker, batch: BatchRecord, deadline_at: float | None) -> None:
        started_at = time.monotonic()
        wall_started = time.time()
        first = worker.progress.finished

        def snapshot() -> Snapshot:
            progress = worker.progress
            return Snapshot(
                total=batch.total,
                done=progress.finished,
                failed_by_kind=dict(progress.failed_by_kind),
                running=progress.running,
                waiting_retry=worker.waiting_retry,
                input_tokens=progress.usage_input,
                output_tokens=progress.usage_output,
                started_at=started_at,
                now=time.monotonic(),
                note=worker.note,
                deadline_at=None if deadline_at is None else started_at + (deadline_at - wall_started),
                done_before=first,
            )

        self.report.progress_start(snapshot())
        try:
            while True:
                await asyncio.sleep(_REFRESH_S)
                self.report.progress(snapshot())
        finally:
            self.report.progress_end(snapshot())

    def _partial(self, service: BatchService, batch_id: str) -> Joined | None:
        try:
            return service.partial(batch_id)
        except StoreError:
            # A full disk has no room for a copy; the segments keep everything.
            return None


def _check_paths(options: JobOptions) -> None:
    if str(options.source) == "-":
        raise UsageError(
            "A run reads its input again when it is resumed, so it cannot read a pipe. "
            "Save it to a file first."
        )
    parent = options.output.parent
    if not parent.is_dir():
        raise UsageError(
            f"The folder {parent} for the results does not exist. Make it, or choose another -o."
        )
    for path in (options.source, options.output, options.error_path):
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"The file name {str(path)!r} is not in UTF-8, so it cannot be written down. Rename the file."
            ) from error
    for path in (options.output, options.error_path):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(
                f"{path} is no regular file. Name a file for the results, such as -o results.jsonl."
            )
    if options.output.is_dir():
        raise UsageError(
            f"{options.output} is a folder. Name a file for the results, such as -o results.jsonl."
        )
    named = {"INPUT": options.source, "--output": options.output, "--errors": options.error_path}
    seen: dict[Path, str] = {}
    for name, path in named.items():
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise UsageError(f"{other} and {name} are the same file, {path}. Choose another name for one.")


def _check_free(path: Path, service: BatchService) -> None:
    if path.exists() and not service.wrote(path):
        raise UsageError(
            f"{path} exists, and it is not of this run. Choose another name, or overwrite it with --restart."
        )


def _check_same(batch: BatchRecord, settings: dict[str, Any]) -> None:
    for name, value, before in _options(settings, batch.settings):
        if before != value:
            raise UsageError(
                f"The earlier run with this output had {name} {_shown(before)}, "
                f"now it is {_shown(value)}. Use the same options to go on, another -o for another run, "
                "or --restart to forget the old one."
            )


def _options(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Each option by its name, with its value now and before."""
    for name, value in now.items():
        if name == "source":
            continue
        if name == "rows":
            rows, earlier = value or {}, before.get("rows") or {}
            for part in sorted({*rows, *earlier}):
                yield part, rows.get(part), earlier.get(part)
        else:
            yield name, value, before.get(name)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _names_model(choice: EngineChoice) -> bool:
    return choice.model is not None or choice.engine.partition(":")[0] != "openai"


def _fit_open_files(concurrency: int) -> int:
    """Raise the soft limit of open files as far as needed; refuse what the hard limit cannot hold."""
    wanted = concurrency + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise UsageError(
                f"--concurrency {concurrency} needs {wanted} open files, and this system allows {hard}. "
                "Lower --concurrency or raise the limit (ulimit -n)."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return concurrency
