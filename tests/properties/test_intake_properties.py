"""Intake, whatever comes: requests read are the requests written, and bad bytes get a line and a reason."""

import json
from collections import Counter

from hypothesis import assume, example, given
from hypothesis import strategies as st

from batchyard.errors import InvalidInput, UsageError
from batchyard.service.intake.chunk import read_requests
from batchyard.service.intake.registration import IntakeRules, register
from batchyard.service.intake.rows import RowPlan, convert_rows, sniff
from batchyard.service.intake.source import numbered_lines
from batchyard.types import Endpoint, Request

ALL = frozenset(Endpoint)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
NEEDS = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RESPONSES: "input",
}


@st.composite
def requests(draw):
    ids = draw(st.lists(TEXT.filter(bool), unique=True, min_size=1, max_size=20))
    made = []
    for index, custom_id in enumerate(ids):
        endpoint = draw(st.sampled_from(Endpoint))
        more = draw(st.dictionaries(TEXT, JSON, max_size=3))
        model = draw(st.none() | TEXT.filter(bool))
        body = {**more, NEEDS[endpoint]: draw(JSON), "model": model}
        body.pop("stream", None)
        encoded = json.dumps(body, ensure_ascii=draw(st.booleans())).encode()
        made.append(Request(custom_id, endpoint, encoded, model, index))
    return made


def written(request, *, ascii_only):
    head = json.dumps(
        {"custom_id": request.custom_id, "method": "POST", "url": request.endpoint}, ensure_ascii=ascii_only
    )
    return head[:-1].encode() + b', "body": ' + request.body + b"}"


@given(st.data(), requests())
def test_requests_read_are_the_requests_written_and_chunks_tile_the_file(tmp_path_factory, data, made):
    path = tmp_path_factory.mktemp("intake") / "requests.jsonl"
    blank = st.sampled_from([b"", b"\n", b"\r\n", b" \n\n"])
    parts = [data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))]
    for request in made:
        line = written(request, ascii_only=data.draw(st.booleans()))
        parts += [data.draw(blank), line, data.draw(st.sampled_from([b"\n", b"\r\n"])), data.draw(blank)]
    content = b"".join(parts)
    if data.draw(st.booleans()):
        content = content.rstrip(b"\r\n ")
    path.write_bytes(content)
    chunk_requests, chunk_bytes = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 2000))
    rules = IntakeRules(ALL, allow_missing_model=True, chunk_requests=chunk_requests, chunk_bytes=chunk_bytes)
    found = register(path, rules)

    read, end = [], len(parts[0])
    for number, span in enumerate(found.chunks):
        assert (span.no, span.offset, span.first_index) == (number, end, len(read))
        assert span.first_line == content[: span.offset].count(b"\n") + 1
        assert 0 < span.count <= chunk_requests
        end = span.offset + span.length
        read += read_requests(content[span.offset : end], span)
    assert read == made
    # Only blank lines may follow the last request.
    assert not content[end:].strip()
    assert found.total == len(made) == sum(found.endpoints.values())
    assert found.endpoints == Counter(one.endpoint for one in made)
    assert set(found.models) == {one.model for one in made} - {None}


def check_refusal(refused, lines):
    assert refused.total == len(refused.errors) > 0
    places = [error.line for error in refused.errors]
    assert places == [None] or all(1 <= place <= lines for place in places)
    assert places == [None] or places == sorted(places)
    for error in refused.errors:
        assert error.code
        assert error.message[-1] in ".)"
        assert "\n" not in error.message


# Lines that are nearly requests find more than random bytes do.
ALMOST = st.one_of(
    st.binary(max_size=40),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            "custom_id": JSON | st.sampled_from(["a", "b"]),
            "method": JSON | st.just("POST"),
            "url": JSON | st.sampled_from(Endpoint),
            "body": JSON
            | st.fixed_dictionaries({}, optional={"model": JSON, "messages": JSON, "stream": JSON}),
        },
    ).map(lambda value: json.dumps(value).encode()),
    st.just(
        b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}'
    ),
)
FILES = st.lists(ALMOST, max_size=8).map(b"\n".join) | st.binary(max_size=200)


@given(FILES)
@example(b"\xff\xfe")
@example(b'{"custom_id":"a"}\x00')
@example(b"-" * 10_000)
@example(b"9" * 10_000)
@example(b'{"custom_id":' + b"9" * 10_000 + b"}")
@example(b'{"a":' * 20_000)
@example(b'"\\ud800\\ud800"')
def test_any_bytes_are_registered_or_refused_with_lines(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("intake") / "requests.jsonl"
    path.write_bytes(content)
    lines = content.count(b"\n") + 1
    try:
        found = register(path, IntakeRules(ALL))
    except InvalidInput as refused:
        check_refusal(refused, lines)
    except UsageError:
        assert content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\xff\xfe", b"\xfe\xff"))
    else:
        assert found.total == sum(span.count for span in found.chunks) > 0


@given(
    FILES | st.lists(st.lists(TEXT, max_size=3).map(",".join), max_size=5).map("\n".join).map(str.encode),
    st.sampled_from(["rows.csv", "rows.tsv", "rows.jsonl"]),
)
def test_any_bytes_taken_for_a_table_become_requests_or_are_refused(tmp_path_factory, content, name):
    folder = tmp_path_factory.mktemp("intake")
    path, target = folder / name, folder / "requests.jsonl"
    path.write_bytes(b"text,n\n" + content if name == "rows.csv" else content)
    try:
        assert sniff(path) in {"requests", "rows", "csv", "tsv"}
        count = convert_rows(path, target, RowPlan(template="{text}"))
    except (InvalidInput, UsageError):
        assert not target.exists()
    else:
        assert register(target, IntakeRules(ALL, allow_missing_model=True)).total == count


@given(st.lists(TEXT.filter(str.strip), min_size=1, max_size=10), st.booleans())
def test_text_of_rows_arrives_unchanged(tmp_path_factory, texts, as_json):
    folder = tmp_path_factory.mktemp("intake")
    path, target = folder / ("rows.jsonl" if as_json else "rows.csv"), folder / "requests.jsonl"
    if as_json:
        path.write_text("\n".join(json.dumps({"text": one}) for one in texts), newline="")
    else:
        quoted = ['"' + one.replace('"', '""') + '"' for one in texts]
        path.write_text("\n".join(["text", *quoted]), encoding="utf-8", newline="")
    convert_rows(path, target, RowPlan(template="{{{text}}}"))
    made = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert [one["body"]["messages"][0]["content"] for one in made] == ["{" + one + "}" for one in texts]
    assert [one["custom_id"] for one in made] == [f"row-{number}" for number in range(1, len(texts) + 1)]


@given(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.binary(max_size=60) | st.text("a\n", max_size=60).map(str.encode),
    st.lists(st.integers(1, 9)),
    st.integers(1, 12),
)
@example(b"\xef\xbb\xbf", b"", [], 1)
@example(b"\xef\xbb\xbf", b"\xef\xbb\xbfx", [1, 1, 1, 1, 1, 1], 9)
def test_lines_are_the_same_however_the_blocks_fall(mark, text, cuts, limit):
    assume(mark or not text.startswith(b"\xef\xbb\xbf"))
    content = mark + text
    blocks, start = [], 0
    for size in cuts:
        blocks.append(content[start : start + size])
        start += size
    blocks.append(content[start:])
    expected = [
        (number, line if len(line) <= limit else len(line))
        for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), 1)
        if text
    ]
    assert [*numbered_lines(iter([one for one in blocks if one]), limit)] == expected
