"""Every way an upstream can fail, met by a live request, a stream and a Batch, with one endpoint and with two.

Each cell has a server, upstreams and sockets of its own. What comes out is compared with the table in
`docs/reference/faults.md`, which this module writes: `python tests/e2e/test_fault_matrix.py`.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import openai
import uvicorn

from batchyard.api.app import make_app
from batchyard.clock import SystemClock
from batchyard.engines.openai import OpenAIEngine
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.pool import EnginePool
from batchyard.service.hosting.served import Served
from batchyard.testing.upstream import Upstream

PAGE = Path(__file__).parents[2] / "docs/reference/faults.md"
GONE = "gone"
#: What the upstream does, and its rule.
FAULTS = {
    "429 twice, `Retry-After: 1`": "429@1x2",
    "429, `Retry-After: 60`": "429@60x1",
    "500 once": "500x1",
    "500 always": "500",
    "503 once, `Retry-After: 1`": "503@1x1",
    "no answer, once": "hangx1",
    "no answer, ever": "hang",
    "connection reset once": "dropx1",
    "answer cut off once": "tornx1",
    "half a JSON object, once": "garbagex1",
    "a web page, once": "htmlx1",
    "200 with an error inside, once": "error200x1",
    "400: the request is at fault": "400",
    "cannot be reached for a while": GONE,
}
MODES = ("live", "stream", "batch")
MESSAGES = [{"role": "user", "content": "Say hello to marker:m please"}]


class Uvicorn(uvicorn.Server):
    """Says when it listens, and leaves signals alone."""

    def __init__(self, app):
        super().__init__(uvicorn.Config(app, port=0, log_level="critical", access_log=False))
        self.listens = asyncio.Event()

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(urls, folder):
    engines = [(OpenAIEngine(url, timeout_s=2), 4) for url in urls]
    engine = engines[0][0] if len(engines) == 1 else EnginePool(engines, SystemClock())
    host = Host(folder, [Served("echo", engine, 4 * len(urls), time.time(), adaptive=True)])
    await host.open()
    server = Uvicorn(make_app(host, open_access=True))
    running = asyncio.create_task(server.serve())
    await server.listens.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=60
        ) as client:
            yield client
    finally:
        server.should_exit = True
        await running
        await host.close()


async def live(client, _upstream):
    try:
        await client.chat.completions.create(model="echo", messages=MESSAGES)
    except openai.APIStatusError as error:
        return words_of(error)
    return "answered"


async def stream(client, _upstream):
    got = 0
    try:
        async for chunk in await client.chat.completions.create(model="echo", messages=MESSAGES, stream=True):
            got += 1
            ended = chunk.choices[0].finish_reason
    except openai.APIStatusError as error:
        return words_of(error)
    except openai.APIError as error:
        return f"{got and 'a part, then '}error `{error.code}`"
    assert ended == "stop"
    return "answered"


def words_of(error):
    words = f"{error.status_code} `{error.code}`"
    if "retry-after" in error.response.headers:
        words += f", `Retry-After: {error.response.headers['retry-after']}`"
    return words


async def batch(client, upstream):
    body = {"model": "echo", "messages": MESSAGES}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": one}
        for name, one in (
            ("m", body),
            ("other", {"model": "echo", "messages": [{"role": "user", "content": "x"}]}),
        )
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    made = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    waited = ""
    while made.status != "completed":
        made = await client.batches.retrieve(made.id)
        if made.waiting_for and not waited:
            waited = "waits, then "
            if upstream.port_closed:
                await upstream.start()
            elif "60 s" in made.waiting_for:
                # As asked; a minute is not waited here.
                await client.batches.cancel(made.id)
                return f"waits {made.waiting_for.rsplit('Waiting ', 1)[1].split(',')[0].split('.')[0][:2]} s, as asked"
        await asyncio.sleep(0.02)
    assert made.request_counts.total == 2
    rows = {}
    for name in (made.output_file_id, made.error_file_id):
        if name is not None:
            text = (await client.files.content(name)).text
            rows |= {row["custom_id"]: row for row in map(json.loads, text.splitlines())}
    assert set(rows) == {"m", "other"}
    assert rows["other"]["response"]["status_code"] == 200
    row = rows["m"]
    if row["error"] is not None:
        return f"{waited}error `{row['error']['code']}`"
    status = row["response"]["status_code"]
    return f"{waited}{'answered' if status == 200 else status}"


class Failing(Upstream):
    """An upstream that may be away."""

    port_closed = False

    async def close(self):
        await super().close()
        self.port_closed = True

    async def start(self):
        await super().start()
        self.port_closed = False


async def cell(rule, mode, endpoints):
    """What its client gets, and how often each endpoint was asked."""
    failing = Failing(rules={} if rule == GONE else {"m": rule})
    others = [Upstream() for _ in range(endpoints - 1)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(one) for one in (failing, *others)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = await stack.enter_async_context(serving(urls, folder / "state"))
        if rule == GONE:
            await failing.close()
        said = await {"live": live, "stream": stream, "batch": batch}[mode](client, failing)
        asked = " + ".join(str(one.calls_by_marker["m"]) for one in (failing, *others))
        return f"{said} ({asked})"


async def matrix():
    at_once = asyncio.Semaphore(12)

    async def run(*what):
        async with at_once:
            return await cell(*what)

    cells = {
        (name, mode, endpoints): asyncio.create_task(run(rule, mode, endpoints))
        for name, rule in FAULTS.items()
        for mode in MODES
        for endpoints in (1, 2)
    }
    await asyncio.gather(*cells.values())
    return {key: task.result() for key, task in cells.items()}


def as_page(found):
    head = ["The upstream"]
    head += [f"{mode.capitalize()}, {'one endpoint' if n == 1 else 'two'}" for mode in MODES for n in (1, 2)]
    rows = [head, ["---"] * len(head)]
    rows += [[name, *(found[name, mode, n] for mode in MODES for n in (1, 2))] for name in FAULTS]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""# What happens when an upstream fails

What the client gets, and in brackets how often each endpoint was asked. Of two endpoints the first fails and
the second is well. Written by `tests/e2e/test_fault_matrix.py`, over real sockets; the upstream's timeout is
2 s there.

{table}

- A **live** request is tried up to three times within ten seconds, two times where the request itself may be
  the cause (no answer in time, an answer that is none). Its stream is begun again only as long as nothing of
  it was passed on.
- A request of a **Batch** is tried up to six times, three where it may be the cause itself, and a rate limit
  is waited out. A connection that was never made costs no attempt: the Batch says that it waits, and goes on
  when the upstream is back.
- A call that was surely **not sent** goes on to the next endpoint at once. Any other is tried again after a
  pause, at the endpoint that did not just fail.
- A **400** is the client's own and is never tried again.
"""


async def test_every_fault_comes_out_as_the_table_in_the_docs_says():
    assert as_page(await matrix()) == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    text = as_page(asyncio.run(matrix()))
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
