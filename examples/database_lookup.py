"""Handlers look up one row each; the database sees one query for all that wait.

python examples/database_lookup.py
"""

import asyncio
import sqlite3

from batchyard import Batcher

database = sqlite3.connect(":memory:", check_same_thread=False)
database.execute("create table prices (item text primary key, cents integer)")
database.executemany("insert into prices values (?, ?)", [(f"item-{n}", n * 10) for n in range(100)])


def look_up(items: list[str]) -> list[int | Exception]:
    """One query; an item that is not there fails alone."""
    marks = ",".join("?" * len(items))
    found = dict(database.execute(f"select item, cents from prices where item in ({marks})", items))  # noqa: S608
    return [found.get(item, KeyError(item)) for item in items]


async def main() -> None:
    """Fifty look-ups at once, one of them in vain."""
    async with Batcher(look_up, max_items=32) as price_of:
        wanted = [f"item-{n}" for n in range(49)] + ["nothing"]
        answers = await asyncio.gather(*map(price_of, wanted), return_exceptions=True)
        print(f"{sum(isinstance(one, int) for one in answers)} found, {answers[-1]!r}")
        print(f"{price_of.stats.dispatches} queries for {len(wanted)} look-ups")


if __name__ == "__main__":
    asyncio.run(main())
