"""Floor 3. Child processes for native engines: a crash in native code never takes the caller down.

The child says one JSON line on its standard output when it is ready, or why it is not. Its standard
input is a pipe that nobody writes to: when it ends, the parent is gone (also by `kill -9`), and the child
ends itself. Knows nothing of what the child computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchyard.errors import EngineError

#: Lines of a child's standard error that are kept for messages.
_KEPT_LINES = 200


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a child that dies is started again."""

    #: More deaths than this within the window, and it is given up.
    max_deaths: int = 5
    window_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0

    def pause_s(self, deaths: Sequence[float], now: float) -> float | None:
        """How long to wait before the next start, given when the child died; None to give up."""
        recent = sum(1 for at in deaths if now - at <= self.window_s)
        if recent > self.max_deaths:
            return None
        return min(self.cap_s, self.base_s * 2.0 ** max(recent - 1, 0))


class ChildProcess:
    """One child process, from start to end.

    Args:
        module: run with `python -m`, with *arguments*.
        name: what messages call it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 300.0,
        stream_limit_bytes: int = 1 << 20,
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._env = {**os.environ, **(env or {})}
        self._ready_timeout_s = ready_timeout_s
        self._limit = stream_limit_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=_KEPT_LINES)
        self._drain: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"pid {self._process.pid}"
        return f"<ChildProcess {self.name} [{state}]>"

    @property
    def pid(self) -> int | None:
        """The process id, once it has been started."""
        return None if self._process is None else self._process.pid

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process; its pipes are the caller's to use once `start` has returned."""
        assert self._process is not None, "the child has not been started"
        return self._process

    async def start(self) -> dict[str, Any]:
        """Start it and wait until it is ready; returns what it said of itself.

        Raises:
            EngineError: it ended, said why it cannot work, or did not get ready in time.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._env,
            limit=self._limit,
            # A group of its own: Ctrl-C in the terminal is for the parent, which then decides.
            start_new_session=True,
        )
        self._drain = asyncio.create_task(self._keep_stderr(self._process))
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                said = await self._first_word(self._process)
        except TimeoutError as error:
            await self.stop()
            message = f"The {self.name} process was not ready within {self._ready_timeout_s:g} s."
            raise EngineError(message) from error
        except BaseException:
            await self.stop()
            raise
        if "error" in said:
            await self.stop()
            raise EngineError(said["error"])
        ready: dict[str, Any] = said["ready"]
        return ready

    async def wait(self) -> str:
        """Wait until it ends; returns how, as the end of a sentence: `was killed by signal 9 (SIGKILL)`."""
        process = self.process
        code = await process.wait()
        if self._drain is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([self._drain], timeout=1.0)
        return ending(code)

    @property
    def last_words(self) -> str:
        """The last line that it wrote on its standard error, or nothing."""
        return next((line for line in reversed(self._stderr) if line.strip()), "")

    async def stop(self) -> None:
        """End it: by closing its input, by force after a moment. Safe to call twice."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                async with asyncio.timeout(2.0):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)
        # The transport closes its pipes only when told to, where the loop may end before it notices.
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - no public way

    async def _first_word(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a library's greeting
            if isinstance(said, dict) and ("ready" in said or "error" in said):
                return said
        how = await self.wait()
        hint = f" Its last words: {self.last_words}" if self.last_words else ""
        raise EngineError(f"The {self.name} process {how} before it was ready.{hint}")

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:
                continue  # a line over the stream's limit
            if not line:
                return
            self._stderr.append(line.decode("utf-8", errors="replace").rstrip())


def ending(code: int) -> str:
    """How a process ended, as the end of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def say_ready(**facts: Any) -> None:
    """In a child: tell the parent that it can begin."""
    sys.stdout.write(json.dumps({"ready": facts}) + "\n")
    sys.stdout.flush()


def say_error(message: str) -> None:
    """In a child: tell the parent, in one sentence, why it cannot work."""
    sys.stdout.write(json.dumps({"error": message}) + "\n")
    sys.stdout.flush()


def exit_with_parent() -> threading.Thread:
    """In a child whose standard input is only the parent's leash: end when it does."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    thread = threading.Thread(target=watch, name="batchyard-leash", daemon=True)
    thread.start()
    return thread
