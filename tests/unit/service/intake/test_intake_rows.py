"""Rows of tables become requests, or are refused with their place and reason."""

import json
import sys

import pytest

from batchyard.errors import InvalidInput, StoreError, UsageError
from batchyard.service.intake import tables
from batchyard.service.intake.registration import IntakeRules, register
from batchyard.service.intake.rows import RowPlan, columns_of, convert_rows, sniff
from batchyard.service.intake.template import Template
from batchyard.types import Endpoint

ASK = RowPlan(template="Classify: {text}")


@pytest.fixture
def write(tmp_path):
    def put(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return put


@pytest.fixture
def convert(write, tmp_path):
    """The requests made of a table, each (custom_id, body)."""

    def make(name, content, plan=ASK):
        target = tmp_path / "requests.jsonl"
        target.unlink(missing_ok=True)
        count = convert_rows(write(name, content), target, plan)
        found = [json.loads(line) for line in target.read_bytes().splitlines()]
        assert len(found) == count
        assert {(one["method"], one["url"]) for one in found} == {("POST", plan.endpoint.value)}
        assert register(target, IntakeRules(frozenset(Endpoint), allow_missing_model=True)).total == count
        return [(one["custom_id"], one["body"]) for one in found]

    return make


@pytest.fixture
def refusal(convert, tmp_path):
    def refuse(name, content, plan=ASK):
        with pytest.raises(InvalidInput) as caught:
            convert(name, content, plan)
        assert not [*tmp_path.glob("requests.jsonl*")]
        assert caught.value.total >= len(caught.value.errors)
        return [str(error) for error in caught.value.errors]

    return refuse


def asked(requests):
    return [(custom_id, body["messages"][-1]["content"]) for custom_id, body in requests]


# --- what a request is made of -------------------------------------------------------------------


def test_a_template_a_system_message_parameters_and_an_id(convert):
    plan = RowPlan(
        template="{t}?", system="Be brief.", params={"max_tokens": 64, "model": "m"}, id_field="key"
    )
    assert convert("rows.csv", "key,t\nk1,Why\n", plan) == [
        (
            "k1",
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Why?"},
                ],
                "max_tokens": 64,
                "model": "m",
            },
        )
    ]


def test_a_field_to_embed(convert):
    plan = RowPlan(field="text", params={"dimensions": 8})
    assert convert("rows.jsonl", '{"text": " Hi "}\n', plan) == [
        ("row-1", {"input": " Hi ", "dimensions": 8})
    ]


def test_rows_are_numbered_from_one_whatever_the_lines(convert):
    assert asked(convert("rows.csv", '\ntext\n\na\n"b\nb"\nc')) == [
        ("row-1", "Classify: a"),
        ("row-2", "Classify: b\nb"),
        ("row-3", "Classify: c"),
    ]
    assert asked(convert("rows.jsonl", '\n{"text":"a"}\r\n\n{"text":"b"}')) == [
        ("row-1", "Classify: a"),
        ("row-2", "Classify: b"),
    ]


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("{a}", "1"),
        ("{{{a}}}", "{1}"),
        ("{{a}} {a}", "{a} 1"),
        ("{u.name} of {u.at.city}", "Ann of Rome"),
        ("{u.dotted}", "whole"),
        ("{yes} {ratio} {list} {u.at}", 'true 0.5 ["é"] {"city": "Rome"}'),
        ("{a}{none}", "1"),
        ("{with space}", "s"),
        ("{a!r}", "bang"),
    ],
)
def test_templates(template, made):
    row = {
        "a": 1,
        "u": {"name": "Ann", "at": {"city": "Rome"}},
        "u.dotted": "whole",
        "yes": True,
        "ratio": 0.5,
        "list": ["é"],
        "none": None,
        "with space": "s",
        "a!r": "bang",
    }
    assert Template(template).fill(row) == made


def test_text_of_a_row_is_never_taken_for_a_placeholder():
    assert Template("{a} {b}").fill({"a": "{b} {{", "b": "}"}) == "{b} {{ }"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("no column", "names no column"),
        ("", "names no column"),
        ("{}", "empty placeholder"),
        ("{ }", "empty placeholder"),
        ("a {text", "single '{' at character 3"),
        ("{text} }", "single '}' at character 8"),
    ],
)
def test_templates_that_are_none(template, words):
    with pytest.raises(UsageError, match=words):
        RowPlan(template=template)


def test_plans_that_make_no_sense():
    for wrong in ({}, {"template": "{a}", "field": "a"}):
        with pytest.raises(UsageError, match="either --template"):
            RowPlan(**wrong)
    with pytest.raises(UsageError, match="no system message"):
        RowPlan(field="a", system="x")
    for name in ("messages", "input", "stream"):
        with pytest.raises(UsageError, match=f'may not hold "{name}"'):
            RowPlan(field="a", params={name: 1})


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    "plan", [RowPlan(template="{txt}"), RowPlan(field="txt"), RowPlan(field="text", id_field="txt")]
)
def test_a_column_that_does_not_exist_names_those_that_do(tmp_path, name, plan):
    path = table(tmp_path / name, [{"text": "a", "note": "b"}])
    with pytest.raises(UsageError, match=r"no column 'txt'\. Its columns are: 'text', 'note'\."):
        convert_rows(path, tmp_path / "requests.jsonl", plan)
    assert not (tmp_path / "requests.jsonl").exists()


def table(path, rows):
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra batchyard[parquet]")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".csv":
        path.write_text("\n".join([",".join(rows[0]), *[",".join(map(str, one.values())) for one in rows]]))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


# --- rows that make no request -------------------------------------------------------------------


def test_empty_cells(convert, refusal):
    two = RowPlan(template="{a}|{b}")
    assert asked(convert("rows.csv", "a,b\n,x\ny,\n", two)) == [("row-1", "|x"), ("row-2", "y|")]
    assert asked(convert("rows.jsonl", '{"a":null,"b":"x"}', two)) == [("row-1", "|x")]
    reason = "are all empty, so there is nothing to ask. Fill in, or leave the row out."
    assert refusal("rows.csv", "a,b\nx,y\n, \n", two) == [f"Line 3: 'a', 'b' {reason}"]
    [told] = refusal("rows.jsonl", '{"text":"a"}\n{"text":null}', RowPlan(field="text"))
    assert told.startswith("Line 2: 'text' is empty, so there is nothing to embed.")


def test_ids_of_rows(refusal):
    plan = RowPlan(field="text", id_field="id")
    content = "id,text\na,x\n,x\n{long},x\nb,x\na,x\n".replace("{long}", "y" * 513)
    assert refusal("rows.csv", content, plan) == [
        "Line 3: 'id' is empty, but each row needs its own custom_id.",
        "Line 4: 'id' has 513 characters; a custom_id may have 512.",
        "Line 6: 'id' repeats line 2 ('a'). Each row needs its own custom_id.",
    ]


def test_a_bad_row_does_not_hide_the_next(refusal):
    content = b'{"text":"a"}\nno json\n[1]\n{"text":"\xff"}\n{"text":"\\ud800"}\n{"other":1}\n' + b"[" * 5000
    told = refusal("rows.jsonl", content)
    assert [one.partition(":")[0] for one in told] == [f"Line {number}" for number in range(2, 8)]
    assert told[4] == "Line 6: The row has no 'text'. Add it, or leave the row out."


def test_a_column_may_be_missing_in_the_first_rows(refusal):
    told = refusal("rows.jsonl", '{"other":1}\n{"text":"a"}')
    assert told == ["Line 1: The row has no 'text'. Add it, or leave the row out."]


def test_errors_are_told_up_to_a_cap(convert):
    with pytest.raises(InvalidInput) as caught:
        convert("rows.jsonl", '{"text":"a"}\n' + "x\n" * 250)
    assert (len(caught.value.errors), caught.value.total) == (100, 250)


@pytest.mark.parametrize(
    ("name", "content"), [("rows.csv", ""), ("rows.csv", "text\n"), ("rows.tsv", "\n\n")]
)
def test_a_table_without_rows(refusal, name, content):
    [told] = refusal(name, content)
    assert told.endswith("holds no row. It needs at least one.")


def test_a_target_that_cannot_be_written(write, tmp_path):
    with pytest.raises(StoreError):
        convert_rows(write("rows.csv", "text\na"), tmp_path / "none" / "requests.jsonl", ASK)


# --- CSV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "\ufefftext,n\r\nä,1\r\n"),
        ("rows.csv", 'n,"text"\n1,"ä"'),
        ("rows.csv", "n;text\n1;ä\n"),
        ("rows.csv", "n\ttext\n1\tä\n"),
        ("rows.tsv", "n,x\ttext\n1\tä\n"),
        ("ROWS.CSV", "text\rä\r"),
    ],
)
def test_dialects(convert, name, content):
    assert asked(convert(name, content)) == [("row-1", "Classify: ä")]


def test_large_cells_and_odd_characters_pass(convert):
    text = "x" * 1_000_000 + "\x00\u2028\x85"
    assert convert("rows.csv", f"text\n{text}\n", RowPlan(field="text")) == [("row-1", {"input": text})]


def test_ragged_rows(refusal):
    assert refusal("rows.csv", "text,n\na,1\nb\nc,1,2\n") == [
        "Line 3: The row has 1 cell, the header has 2.",
        "Line 4: The row has 3 cells, the header has 2.",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text,text\na,b", "names the column 'text' twice"),
        (b'text\n"never closed\n', "line 2: the file ends within a quoted cell"),
        (b'text\n"a"b\n', "line 2: .* Quote cells"),
        (b"text\na\xff\n", r"no UTF-8.*0xff"),
        ("text\na".encode("utf-16"), "is UTF-16"),
        (b"\xfftext\na", r"no UTF-8 \(byte 0xff\)"),
    ],
)
def test_files_that_are_no_csv(write, tmp_path, content, words):
    with pytest.raises(UsageError, match=words):
        convert_rows(write("rows.csv", content), tmp_path / "requests.jsonl", ASK)


def test_lines_and_cells_are_bounded(write, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 1000)
    for name, content, words in (
        ("rows.csv", "text\n" + "x" * 1001, "line 2: the line is longer than 1,000 characters"),
        ("rows.jsonl", '{"text":"a"}\n' + "x" * 1001, None),
    ):
        with pytest.raises((UsageError, InvalidInput), match=words):
            convert_rows(write(name, content), tmp_path / "requests.jsonl", ASK)


def test_a_quotation_mark_that_is_never_closed_costs_bounded_memory(write, tmp_path):
    content = 'text\n"' + ("x" * 1023 + "\n") * (17 << 10)
    with pytest.raises(UsageError, match="a quotation mark is never closed"):
        convert_rows(write("rows.csv", content), tmp_path / "requests.jsonl", ASK)


# --- Parquet -------------------------------------------------------------------------------------


def test_parquet(convert, tmp_path):
    rows = [
        {"id": number, "text": f"t{number}", "unused": b"\xff", "u": {"a": "x"}, "flag": True}
        for number in range(10)
    ]
    path = table(tmp_path / "rows.parquet", rows)
    target = tmp_path / "requests.jsonl"
    plan = RowPlan(template="{text} {u.a} {flag}", id_field="id")
    assert convert_rows(path, target, plan) == 10
    found = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert found[3]["custom_id"] == "3"
    assert found[3]["body"] == {"messages": [{"role": "user", "content": "t3 x true"}]}


def test_parquet_rows_that_make_no_request_are_named_by_number(tmp_path):
    path = table(tmp_path / "rows.parquet", [{"text": "a", "raw": b"x"}, {"text": None, "raw": b"x"}])
    for column, told in (("text", "Row 2: 'text' is empty"), ("raw", "Row 1: 'raw' holds bytes")):
        with pytest.raises(InvalidInput) as caught:
            convert_rows(path, tmp_path / "requests.jsonl", RowPlan(field=column))
        assert str(caught.value.errors[0]).startswith(told)


def test_parquet_that_is_damaged(tmp_path):
    path = table(tmp_path / "rows.parquet", [{"text": "a" * number} for number in range(1000)])
    data = path.read_bytes()
    for wrong in (data[:-10], b"PAR1", data[: len(data) // 2] + data[-200:]):
        path.write_bytes(wrong)
        with pytest.raises(UsageError, match="cannot be read as Parquet"):
            convert_rows(path, tmp_path / "requests.jsonl", ASK)


def test_parquet_without_its_package_names_the_extra(write, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"batchyard\[parquet\]"):
        convert_rows(write("rows.parquet", b"PAR1xxxx"), tmp_path / "requests.jsonl", ASK)


# --- what a file is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.csv", "x", "csv"),
        ("a.TSV", "x", "tsv"),
        ("a.parquet", "", "parquet"),
        ("a", "PAR1....", "parquet"),
        ("a.jsonl", '\ufeff\n\n{"custom_id":"a","method":"POST","url":"/v1/x","body":{}}', "requests"),
        ("a.jsonl", '{"method":"POST","url":"/v1/x","body":{}}', "requests"),
        ("a.jsonl", '{"custom_id":"a","method":"POST","url":"/v1/x","body":"x"}', "requests"),
        ("a.jsonl", '{"custom_id":"a","body":{}}', "requests"),
        ("a.jsonl", '{"custom_id":"a"}', "requests"),
        ("a.jsonl", '{"custom_id":"a","body":[]}', "requests"),
        ("a.jsonl", '{"body":"a"}', "rows"),
        ("a.jsonl", '{"text":"a"}', "rows"),
        ("a.jsonl", '{"custom_id":"a","text":"a"}', "rows"),
        ("news.jsonl", '{"url":"https://x","title":"a","body":"b"}', "rows"),
        ("a.jsonl", "no json", "requests"),
        ("a.jsonl", "", "requests"),
        ("a.jsonl", "[1]", "requests"),
        ("a.jsonl", "{}", "requests"),
        ("a.jsonl", "[" * 9000, "requests"),
        ("a.jsonl", b'{"a":"\xff"}', "requests"),
    ],
)
def test_sniff(write, name, content, kind):
    assert sniff(write(name, content)) == kind


def test_sniff_reads_a_first_row_of_several_blocks(write):
    assert sniff(write("a.jsonl", json.dumps({"text": "x" * 3_000_000}))) == "rows"


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_columns_of(tmp_path, name):
    assert columns_of(table(tmp_path / name, [{"text": "a", "n": 1}])) == ["text", "n"]


def test_columns_of_a_table_without_rows(write):
    assert columns_of(write("rows.csv", "")) == []
    assert columns_of(write("rows.jsonl", '[1]\n{"a":1}')) == ["a"]
