"""The demo ships real texts of many lengths, each with a source that allows it."""

import json
from importlib.resources import files

DATA = files("batchyard.cli") / "demo_data"


def rows():
    return [json.loads(line) for line in (DATA / "texts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_texts_are_many_distinct_and_of_mixed_length():
    texts = [row["text"] for row in rows()]
    assert len(texts) >= 60
    assert len(set(texts)) == len(texts)
    words = sorted(len(text.split()) for text in texts)
    assert words[0] < 10
    assert words[-1] > 70


def test_ids_are_unique_and_every_source_is_named():
    sources = (DATA / "SOURCES.md").read_text(encoding="utf-8")
    assert len({row["id"] for row in rows()}) == len(rows())
    for row in rows():
        assert row["source"] in sources
        assert row["author"] in sources
