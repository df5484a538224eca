"""A handler for one text at a time; the model behind it is called with all that wait. Needs: fastapi, httpx.

python examples/fastapi_handler.py           # asks itself fifty times
uvicorn --app-dir examples fastapi_handler:app
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from batchyard import Batcher


async def score(texts: list[str]) -> list[float]:
    """Stand for a model: 20 ms, however many texts."""
    await asyncio.sleep(0.02)
    return [len(set(text)) / max(1, len(text)) for text in texts]


batcher = Batcher(score, max_items=32)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Answer what waits before the server ends."""
    yield
    await batcher.close()


app = FastAPI(lifespan=lifespan)


@app.get("/score")
async def get_score(text: str) -> float:
    """One text in, one score out; a client that disconnects takes its text out of the queue."""
    return await batcher(text, timeout_s=10)


async def main() -> None:
    """Fifty requests at once, without a network."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example") as client:
        answers = await asyncio.gather(*(client.get("/score", params={"text": "ab" * n}) for n in range(50)))
    print(f"{sum(one.status_code == 200 for one in answers)} answers, {batcher.stats.dispatches} calls")


if __name__ == "__main__":
    asyncio.run(main())
