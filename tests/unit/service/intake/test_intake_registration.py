"""Registering an input: what is accepted, what is refused with which words, and where chunks lie."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from typing import get_args, get_type_hints

import pytest

from batchyard.errors import InputChanged, InvalidInput, UsageError
from batchyard.service.intake import scan
from batchyard.service.intake.chunk import read_requests
from batchyard.service.intake.diagnosis import MAX_CUSTOM_ID, MAX_DEPTH
from batchyard.service.intake.registration import IntakeRules, register
from batchyard.types import Endpoint, Request

ALL = frozenset(Endpoint)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def line(custom_id="a", method="POST", url="/v1/chat/completions", body=CHAT, **more):
    found = {"custom_id": custom_id, "method": method, "url": url, "body": body, **more}
    return json.dumps({key: value for key, value in found.items() if value is not ...}).encode()


@pytest.fixture
def intake(tmp_path):
    def take(*lines, endpoints=ALL, on_progress=None, **rules):
        path = tmp_path / "requests.jsonl"
        path.write_bytes(b"\n".join(lines))
        return register(path, IntakeRules(endpoints, **rules), on_progress=on_progress)

    return take


@pytest.fixture
def refusal(intake):
    def refuse(*lines, **rules):
        with pytest.raises(InvalidInput) as caught:
            intake(*lines, **rules)
        return [(error.line, error.code, error.param, error.message) for error in caught.value.errors]

    return refuse


def requests_of(found):
    data = found.path.read_bytes()
    return [
        request
        for span in found.chunks
        for request in read_requests(data[span.offset : span.offset + span.length], span)
    ]


# --- accepted ------------------------------------------------------------------------------------


def test_what_a_registration_says(intake):
    lines = [
        line("a"),
        line("b", url="/v1/embeddings", body={"model": "n", "input": "x"}),
        line("c", url="/v1/completions", body={"model": "m", "prompt": "x"}),
        line("d", url="/v1/responses", body={"model": "m", "input": "x"}),
    ]
    seen = []
    found = intake(*lines, on_progress=seen.append)
    data = b"\n".join(lines)
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert found.size_bytes == len(data)
    assert found.mtime_ns == found.path.stat().st_mtime_ns
    assert found.total == 4
    assert found.models == ("m", "n")
    assert found.endpoints == dict.fromkeys(Endpoint, 1)
    assert seen == [len(data)]
    assert [request.endpoint for request in requests_of(found)] == [
        Endpoint.CHAT,
        Endpoint.EMBEDDINGS,
        Endpoint.COMPLETIONS,
        Endpoint.RESPONSES,
    ]


def test_bom_crlf_blank_lines_and_no_final_newline_are_fine(intake):
    found = intake(b"\xef\xbb\xbf" + line("a") + b"\r", b"\r", b"", b"  \t", line("b"))
    assert [(one.custom_id, one.index) for one in requests_of(found)] == [("a", 0), ("b", 1)]
    [span] = found.chunks
    assert (span.offset, span.offset + span.length, span.first_line) == (3, found.size_bytes, 1)


def test_unknown_members_are_accepted(intake):
    assert intake(line("a", note="mine", metadata={"x": [1]})).total == 1


def test_ids_are_kept_as_they_are(intake):
    ids = ["\u2028", "\x00\n", "é" * MAX_CUSTOM_ID, "😀", " a ", "a"]
    found = intake(*[line(one) for one in ids])
    assert [one.custom_id for one in requests_of(found)] == ids


def test_bodies_are_kept_byte_for_byte(intake):
    raw = b'{ "messages" : [ 1.10, 1E400, "\\u00e9\xc3\xa9" ],"model":"m" }'
    head = b'{"body": %b ,"url":"/v1/chat/completions","method":"POST","custom_id":"a"}'
    assert requests_of(intake(head % raw)) == [Request("a", Endpoint.CHAT, raw, "m", 0)]


def test_a_model_may_be_left_to_the_engine(intake):
    found = intake(line(body={"messages": [1]}), allow_missing_model=True)
    assert found.models == ()
    assert requests_of(found)[0].model is None


def test_limit_takes_the_first_requests_and_looks_no_further(intake):
    found = intake(line("a"), b"", line("b"), line("c"), b"no json", limit=2)
    assert [one.custom_id for one in requests_of(found)] == ["a", "b"]


def test_nesting_up_to_the_limit_is_accepted_and_readable(intake):
    for depth in (2, MAX_DEPTH - 2):
        deep = b'{"model":"m","messages":' + b"[" * depth + b"]" * depth + b"}"
        whole = line(body={}).replace(b"{}", deep)
        assert json.loads(requests_of(intake(whole))[0].body)["model"] == "m"


def test_brackets_in_text_do_not_count_as_nesting(intake):
    body = {"model": "m", "messages": [{"role": "user", "content": '["{' * 1000 + '\\"'}]}
    assert intake(line(body=body)).total == 1


# --- chunks --------------------------------------------------------------------------------------


def test_chunks_hold_so_many_requests_and_start_where_the_last_ended(intake):
    found = intake(*[line(f"id-{number}") for number in range(1, 8)], chunk_requests=3)
    assert [(one.no, one.first_index, one.first_line, one.count) for one in found.chunks] == [
        (0, 0, 1, 3),
        (1, 3, 4, 3),
        (2, 6, 7, 1),
    ]
    ends = [one.offset + one.length for one in found.chunks]
    assert [one.offset for one in found.chunks] == [0, *ends[:-1]]
    assert ends[-1] == found.size_bytes


def test_chunks_end_early_where_requests_are_large(intake):
    large = {"model": "m", "messages": ["x" * 3000]}
    found = intake(*[line(str(number), body=large) for number in range(6)], chunk_bytes=5000)
    assert [one.count for one in found.chunks] == [2, 2, 2]


def test_lines_over_several_blocks(intake):
    large = {"model": "m", "messages": ["é" * 900_000]}
    found = intake(*[line(str(number), body=large) for number in range(4)], line("end"))
    assert [one.custom_id for one in requests_of(found)] == ["0", "1", "2", "3", "end"]


def test_a_chunk_that_changed_meanwhile_is_told(intake):
    found = intake(line("a"), line("b"))
    [span] = found.chunks
    data = found.path.read_bytes()
    for other in (b"", data[:-1], data[:60], data.replace(b"/v1/chat", b"/v9/chat"), b"[" * 50_000):
        with pytest.raises(InputChanged, match="2 requests from line 1"):
            read_requests(other, span)


# --- refused -------------------------------------------------------------------------------------

BAD_LINES = {
    "no JSON": (b"hello", "invalid_json_line", None, "not valid JSON"),
    "cut off": (line()[:-9], "invalid_json_line", None, "not valid JSON"),
    "two objects": (line() + line(), "invalid_json_line", None, "not valid JSON"),
    "an array": (b"[1, 2]", "invalid_json_line", None, "items of the array"),
    "a string": (b'"text"', "invalid_json_line", None, "is a string"),
    "pretty-printed": (b"  {", "invalid_json_line", None, "goes on in the next line"),
    "NaN": (line(body={**CHAT, "x": float("nan")}), "invalid_json_line", None, "NaN is no JSON value"),
    "Infinity": (line(body={**CHAT, "x": float("-inf")}), "invalid_json_line", None, "-Infinity is no"),
    "raw control character": (
        line("a\u0001").replace(b"\\u0001", b"\x01"),
        "invalid_json_line",
        None,
        "control",
    ),
    "invalid UTF-8": (line("~").replace(b"~", b"\xff"), "invalid_json_line", None, "(0xff) is no UTF-8"),
    "invalid UTF-8 in the body": (
        line(body={**CHAT, "x": "~"}).replace(b"~", b"\xc3"),
        "invalid_json_line",
        None,
        "(0xc3) is no UTF-8",
    ),
    "raw surrogate": (
        line("~").replace(b"~", b"\xed\xa0\x80"),
        "invalid_json_line",
        None,
        "(0xed) is no UTF-8",
    ),
    "surrogate in the id": (line("\ud800"), "invalid_json_line", None, "half of a surrogate pair (\\ud800)"),
    "surrogate in the body": (
        line(body={**CHAT, "x": ["\udfff!"]}),
        "invalid_json_line",
        None,
        "half of a surrogate pair (\\udfff)",
    ),
    "surrogate in a name": (
        line(body={**CHAT, "\ud800": 1}),
        "invalid_json_line",
        None,
        "half of a surrogate pair",
    ),
    "5,000 levels": (
        line(body=...).replace(b"}", b', "body": {"model":"m","messages":%b}}' % (b"[" * 5000 + b"]" * 5000)),
        "invalid_json_line",
        None,
        "deeper than 256 levels",
    ),
    "one level too many": (
        line(body={}).replace(b"{}", b'{"a":' * 256 + b"1" + b"}" * 256),
        "invalid_json_line",
        None,
        "deeper than 256 levels",
    ),
    "100,000 open brackets": (b"[" * 100_000, "invalid_json_line", None, "deeper than 256 levels"),
    "id missing": (line(...), "missing_required_parameter", "custom_id", '"custom_id" is missing'),
    "id a number": (line(7), "invalid_type", "custom_id", '"custom_id" is a number; it must be a string.'),
    "id null": (line(None), "invalid_type", "custom_id", '"custom_id" is null'),
    "id empty": (line(""), "invalid_value", "custom_id", '"custom_id" is empty'),
    "id too long": (line("x" * 513), "string_above_max_length", "custom_id", "has 513 characters"),
    "method missing": (line(method=...), "missing_required_parameter", "method", '"method" is missing'),
    "method wrong": (line(method="GET"), "invalid_value", "method", '"method" is "GET"; it must be "POST".'),
    "url missing": (line(url=...), "missing_required_parameter", "url", '"url" is missing'),
    "url unknown": (line(url="/v1/images"), "invalid_url", "url", '"url" is "/v1/images", which is unknown.'),
    "url misspelt": (
        line(url="/v1/chat/completion"),
        "invalid_url",
        "url",
        "Did you mean /v1/chat/completions?",
    ),
    "url whole": (
        line(url="https://api.example.com/v1/embeddings/"),
        "invalid_url",
        "url",
        "Did you mean /v1/embeddings?",
    ),
    "url no string": (line(url=["x"]), "invalid_url", "url", '"url" is ["x"]'),
    "body missing": (line(body=...), "missing_required_parameter", "body", '"body" is missing'),
    "body an array": (line(body=[]), "invalid_type", "body", '"body" is an array'),
    "body null": (line(body=None), "invalid_type", "body", '"body" is null'),
    "body a string": (line(body="{}"), "invalid_type", "body", '"body" is a string'),
    "model missing": (
        line(body={"messages": []}),
        "invalid_request",
        "body.model",
        '"body.model" is missing',
    ),
    "model a number": (line(body={**CHAT, "model": 4}), "invalid_type", "body.model", "is a number"),
    "stream": (line(body={**CHAT, "stream": True}), "streaming_unsupported", "body.stream", "cannot stream"),
    "stream a string": (line(body={**CHAT, "stream": "yes"}), "invalid_type", "body.stream", "is a string"),
    "messages missing": (
        line(body={"model": "m"}),
        "invalid_request",
        "body.messages",
        '"body.messages" is missing; /v1/chat/completions needs it.',
    ),
    "prompt missing": (
        line(url="/v1/completions", body=CHAT),
        "invalid_request",
        "body.prompt",
        '"body.prompt" is missing',
    ),
    "input missing": (
        line(url="/v1/embeddings", body=CHAT),
        "invalid_request",
        "body.input",
        '"body.input" is missing',
    ),
}


@pytest.mark.parametrize(("raw", "code", "param", "words"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_with_its_reason(refusal, raw, code, param, words):
    [found] = refusal(line("first"), b"", raw, line("last"))
    assert found[:3] == (3, code, param)
    assert words in found[3]
    assert found[3][-1] in ".)"


def test_all_errors_of_a_line_are_told_at_once(refusal):
    found = refusal(line("", "PUT", "/v1/x", {"stream": True}))
    assert [one[2] for one in found] == ["custom_id", "method", "url", "body.model", "body.stream"]


def test_an_endpoint_that_the_engine_does_not_serve(refusal):
    [found] = refusal(line(), endpoints=frozenset({Endpoint.EMBEDDINGS}))
    assert found[1:3] == ("invalid_url", "url")
    assert found[3].startswith('This engine does not answer "url" "/v1/chat/completions".')


def test_several_endpoints_where_one_is_wanted(refusal, intake):
    other = line("b", url="/v1/embeddings", body={"model": "m", "input": "x"})
    [found] = refusal(line("a"), other, line("c"), same_endpoint=True)
    assert found[:3] == (2, "invalid_url", "url")
    assert "/v1/chat/completions" in found[3]
    assert intake(line("a"), line("c"), same_endpoint=True).total == 2


def test_a_second_model_names_both_lines(refusal):
    other = {**CHAT, "model": "n"}
    [found] = refusal(b"", line("a"), line("b", body=other), line("c", body=other), several_models=False)
    assert found[:3] == (3, "mismatched_model", "body.model")
    assert found[3].startswith('The model "n" is not the "m" of line 2.')


def test_a_repeated_id_names_both_lines(refusal):
    found = refusal(line("a"), line("b"), b"", line("a"), line("c"), line("a"))
    assert found == [
        (
            number,
            "duplicate_custom_id",
            "custom_id",
            '"custom_id" repeats line 1. Each request needs its own custom_id.',
        )
        for number in (4, 6)
    ]


def test_an_id_written_with_escapes_is_the_same_id(refusal):
    [found] = refusal(line("a"), line("~").replace(b"~", b"\\u0061"))
    assert found[:2] == (2, "duplicate_custom_id")


def test_lines_with_other_errors_are_looked_at_for_repeated_ids_as_well(refusal):
    found = refusal(line("a", method="GET"), line("a"), line("a", body=[]))
    assert [one[:2] for one in found] == [
        (1, "invalid_value"),
        (2, "duplicate_custom_id"),
        (3, "invalid_type"),
        (3, "duplicate_custom_id"),
    ]


def test_ids_whose_hashes_collide_are_not_repeated(intake, refusal, monkeypatch):
    monkeypatch.setattr(scan, "_HASH_BITS", 3)
    names = [line(f"id-{number}") for number in range(50)]
    assert intake(*names).total == 50
    assert [one[0] for one in refusal(*names, line("id-7"))] == [51]


def test_errors_come_in_order_up_to_a_cap_with_their_true_number(intake):
    lines = [line("same")] * 5 + [b"x"] * 10 + [line("same")]
    with pytest.raises(InvalidInput) as caught:
        intake(*lines, max_errors=6)
    assert [error.line for error in caught.value.errors] == [2, 3, 4, 5, 6, 7]
    assert caught.value.total == 15


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"\r\n  \n"])
def test_an_input_without_requests(refusal, data):
    [found] = refusal(data)
    assert found[:3] == (None, "empty_file", None)


@pytest.mark.parametrize("ending", [b"", b"\n" + line("b")])
def test_an_overlong_line_is_refused_and_the_scan_goes_on(refusal, ending):
    for length in (5001, 1_500_000, 3_000_000):
        found = refusal(b"\xef\xbb\xbf" + line("a"), b"x" * length + ending, b"bad", max_line_bytes=5000)
        assert found[0][:2] == (2, "line_too_long")
        assert f"{length:,} bytes; the limit is 5,000" in found[0][3]
        assert found[1][:2] == (3 + bool(ending), "invalid_json_line")


@pytest.mark.parametrize("position", ["middle", "end"])
def test_a_line_of_300_mb_is_refused_in_bounded_memory(tmp_path, position):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(line("a") + b"\n")
        file.seek(300_000_000, os.SEEK_CUR)  # a hole: reads as NUL bytes, takes no room on the disk
        file.write(b"x")
        if position == "middle":
            file.write(b"\n" + line("a") + b"\n")
    program = """
        import re, sys
        from pathlib import Path
        from batchyard.errors import InvalidInput
        from batchyard.service.intake.registration import IntakeRules, register
        from batchyard.types import Endpoint
        try:
            register(Path(sys.argv[1]), IntakeRules(frozenset(Endpoint)))
        except InvalidInput as error:
            print(*[f"{one.line}:{one.code}" for one in error.errors])
        # ru_maxrss would include what the parent held when it forked.
        print(int(re.search(r"VmHWM:[^0-9]*([0-9]+)", Path("/proc/self/status").read_text())[1]) // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    told, peak_mb = done.stdout.splitlines()
    assert told == ("2:line_too_long 3:duplicate_custom_id" if position == "middle" else "2:line_too_long")
    assert int(peak_mb) < 150


# --- files that cannot be read -------------------------------------------------------------------


def test_a_folder_a_missing_file_and_a_pipe(tmp_path):
    rules = IntakeRules(ALL)
    with pytest.raises(UsageError, match="is a folder"):
        register(tmp_path, rules)
    with pytest.raises(UsageError, match="does not exist"):
        register(tmp_path / "none.jsonl", rules)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        register(tmp_path / "pipe", rules)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="cannot be read"):
        register(tmp_path / "loop", rules)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "secret.jsonl"
    path.write_bytes(line())
    path.chmod(0)
    with pytest.raises(UsageError, match="may not be read"):
        register(path, IntakeRules(ALL))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x1f\x8b\x08rest", "gzip"),
        (b"PK\x03\x04rest", "ZIP archive or a spreadsheet"),
        (b"\x28\xb5\x2f\xfdrest", "zstd"),
        ("{}".encode("utf-16"), "UTF-16"),
    ],
)
def test_other_kinds_of_files_are_recognised(tmp_path, data, words):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=words):
        register(path, IntakeRules(ALL))


def test_a_file_that_grows_while_it_is_read(tmp_path):
    path = tmp_path / "growing.jsonl"
    path.write_bytes(line("a") + b"\n")

    def grow(_):
        if path.stat().st_size < 1000:
            with path.open("ab") as file:
                file.write(b"\n" * 1000)

    with pytest.raises(InputChanged, match="written to while it was read"):
        register(path, IntakeRules(ALL), on_progress=grow)


# --- what the fast path takes for granted --------------------------------------------------------


def test_the_fast_path_knows_every_endpoint():
    literal = get_type_hints(scan.Line)["url"]
    assert set(get_args(literal)) == {one.value for one in Endpoint}
    decoded = [scan.decode_line(line(one)).url for one in "ab"]
    assert decoded[0] is decoded[1]


def lowest_free_handle():
    handle = os.open(os.devnull, os.O_RDONLY)
    os.close(handle)
    return handle


def test_no_handle_is_left_open(refusal, intake):
    before = lowest_free_handle()
    refusal(b"x")
    intake(line())
    with pytest.raises(UsageError):
        intake(b"PK\x03\x04")
    assert lowest_free_handle() == before
