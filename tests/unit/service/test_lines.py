"""Output lines are one line, ASCII, and equal in meaning to what the engine said."""

import json

from hypothesis import given
from hypothesis import strategies as st

from batchyard.service.lines import LineWriter, ascii_json
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
REQUEST = Request('id-\u2028 "é"', Endpoint.CHAT, b"{}", index=3)


@given(JSON, st.booleans())
def test_any_json_becomes_one_ascii_line_of_the_same_meaning(value, indent):
    text = json.dumps(value, ensure_ascii=False, indent=2 if indent else None)
    body = (
        text.encode("utf-8", errors="surrogatepass")
        if not has_surrogate(text)
        else json.dumps(value).encode()
    )
    line = ascii_json(body)
    assert line.isascii()
    assert b"\n" not in line
    assert b"\r" not in line
    assert json.loads(line) == value


def has_surrogate(text):
    return any(0xD800 <= ord(char) <= 0xDFFF for char in text)


def test_numbers_pass_through_as_they_were_written():
    body = b'{"big":123456789012345678901234567890,"exp":1E400,"small":1.10}'
    assert ascii_json(body) is body


def test_separators_that_line_readers_split_at_are_escaped():
    writer = LineWriter("batch_abc")
    line = writer.answered(REQUEST, Answer(200, '{"text":"a\u2028b\u0085c\u2029d"}'.encode()))
    assert len(line.decode().splitlines()) == 1
    parsed = json.loads(line)
    assert parsed["response"]["body"]["text"] == "a\u2028b\u0085c\u2029d"
    assert parsed["custom_id"] == REQUEST.custom_id
    assert parsed["id"] == "batch_req_abc_3"
    assert parsed["error"] is None


def test_a_fault_with_a_status_is_a_response_and_keeps_the_upstreams_body():
    writer = LineWriter("batch_abc")
    fault = Fault(FaultKind.SERVER_ERROR, "The server failed.", 500, b'{"error":{"message":"boom"}}')
    parsed = json.loads(writer.gave_up(REQUEST, fault, 6))
    assert parsed["response"]["status_code"] == 500
    assert parsed["response"]["body"] == {"error": {"message": "boom"}}
    assert parsed["error"] is None


def test_a_fault_with_an_html_page_gets_an_envelope():
    fault = Fault(FaultKind.SERVER_ERROR, "The server answered 502 with HTML.", 502, b"<html>")
    parsed = json.loads(LineWriter("batch_abc").gave_up(REQUEST, fault, 1))
    assert parsed["response"]["body"]["error"]["message"] == "The server answered 502 with HTML."


def test_a_fault_without_a_status_is_an_error_that_tells_the_attempts():
    fault = Fault(FaultKind.TIMEOUT, "No answer within 600 s.")
    parsed = json.loads(LineWriter("batch_abc").gave_up(REQUEST, fault, 6))
    assert parsed["response"] is None
    assert parsed["error"] == {
        "code": "request_timeout",
        "message": "No answer within 600 s. Gave up after 6 attempts.",
    }
