"""Twenty callers, one at a time each; the function is called with lists.

python examples/batched_function.py
"""

import asyncio

from batchyard import batched


@batched(max_items=8)
async def word_counts(texts: list[str]) -> list[int]:
    """Stand for a model or a database: one call for many items."""
    print(f"called with {len(texts)} texts")
    await asyncio.sleep(0.01)
    return [len(text.split()) for text in texts]


async def main() -> None:
    """Ask as if there were no batching."""
    counts = await asyncio.gather(*(word_counts("word " * n) for n in range(20)))
    print(counts)


if __name__ == "__main__":
    asyncio.run(main())
