"""Child processes: they tell when they are ready, and they never outlive their parent."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from batchyard.engines.child import ChildProcess, RestartPolicy, ending
from batchyard.errors import EngineError

READY = """
from batchyard.engines.child import exit_with_parent, say_ready
import threading
print("a library's greeting")
exit_with_parent()
say_ready(answer=42)
threading.Event().wait()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module for a child; returns its name."""

    def write(source):
        (tmp_path / "child_under_test.py").write_text(textwrap.dedent(source))
        return "child_under_test"

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


async def test_it_tells_what_it_said_of_itself_and_ends_when_told_to(module):
    child = ChildProcess(module(READY), name="test")
    assert await child.start() == {"answer": 42}
    await child.stop()
    assert child.process.returncode == 0
    await child.stop()


async def test_why_it_cannot_work_becomes_the_error(module):
    child = ChildProcess(module("from batchyard.engines.child import *\nsay_error('No model.')"), name="test")
    with pytest.raises(EngineError, match=r"^No model\.$"):
        await child.start()


async def test_a_child_that_dies_before_it_is_ready_is_told_with_its_last_words(module):
    child = ChildProcess(module("import sys\nsys.exit('out of memory')"), name="test")
    with pytest.raises(EngineError, match="ended with exit code 1 before it was ready.*out of memory"):
        await child.start()


async def test_a_child_that_is_never_ready_is_given_up(module):
    child = ChildProcess(module("import threading\nthreading.Event().wait()"), name="t", ready_timeout_s=0.5)
    with pytest.raises(EngineError, match="not ready within 0.5 s"):
        await child.start()
    assert child.process.returncode == -signal.SIGKILL


async def test_a_killed_child_is_told_by_its_signal(module):
    child = ChildProcess(module(READY), name="test")
    await child.start()
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == "was killed by signal 9 (SIGKILL)"
    await child.stop()


def test_a_child_ends_when_its_parent_is_killed(module, tmp_path):
    parent = f"""
    import asyncio, sys
    from batchyard.engines.child import ChildProcess
    async def main():
        child = ChildProcess({module(READY)!r}, name="test")
        await child.start()
        print(child.pid, flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        watch = os.pidfd_open(pid)
        process.kill()
    # A pidfd becomes readable when its process ends: the signal to wait for.
    import select

    readable, _, _ = select.select([watch], [], [], 30)
    os.close(watch)
    assert readable


def test_endings_in_words():
    assert ending(3) == "ended with exit code 3"
    assert ending(-11) == "was killed by signal 11 (SIGSEGV)"
    assert ending(-200) == "was killed by signal 200"


def test_restarts_back_off_and_give_up_only_when_deaths_come_close_together():
    policy = RestartPolicy(max_deaths=3, window_s=60, base_s=0.1, cap_s=0.3)
    assert policy.pause_s([100.0], 100.0) == 0.1
    assert policy.pause_s([99.0, 100.0], 100.0) == 0.2
    assert policy.pause_s([98.0, 99.0, 100.0], 100.0) == 0.3
    assert policy.pause_s([97.0, 98.0, 99.0, 100.0], 100.0) is None
    assert policy.pause_s([1.0, 2.0, 3.0, 100.0], 100.0) == 0.1
