"""What a reply of an upstream means: an answer, a fault, or the end of the engine."""

import json
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.engines.openai.address import read_base_url, without_password
from batchyard.engines.openai.reading import read_outcome, retry_after_s
from batchyard.engines.usage import UsageFields, usage_of
from batchyard.errors import EngineError, UsageError
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Usage

NOW = 1_800_000_000.0
GOOD = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":2}}}'


def read(status, body=GOOD, headers=None, endpoint=Endpoint.CHAT):
    return read_outcome(endpoint, status, headers or {}, body, wall_s=NOW)


def test_a_good_answer_keeps_its_bytes_its_usage_and_its_id():
    outcome = read(200, headers={"x-request-id": "req-7"})
    assert outcome == Answer(200, GOOD, Usage(3, 5, 2), "req-7")


@pytest.mark.parametrize(
    ("endpoint", "body", "usage"),
    [
        (Endpoint.EMBEDDINGS, b'{"data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}', Usage(4, 0, 0)),
        (
            Endpoint.RESPONSES,
            (
                b'{"output":[],"status":"failed","error":{"code":"e"},"usage":{"input_tokens":4,"output_tokens":1,'
                b'"input_tokens_details":{"cached_tokens":3}}}'
            ),
            Usage(4, 1, 3),
        ),
        (Endpoint.COMPLETIONS, b'{"choices":[],"usage":null}', Usage()),
        (Endpoint.CHAT, b'{"choices":[],"error":null}', Usage()),
        (
            Endpoint.CHAT,
            b'{"choices":[],"usage":{"prompt_tokens":"many","completion_tokens":2.0}}',
            Usage(0, 2),
        ),
        (Endpoint.CHAT, b'{"choices":[],"usage":[1]}', Usage()),
        (Endpoint.CHAT, '{"choices":["ü 漢"],"usage":{"prompt_tokens":1}}'.encode(), Usage(1)),
    ],
)
def test_every_endpoints_success_and_usage(endpoint, body, usage):
    assert read(200, body, endpoint=endpoint) == Answer(200, body, usage)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"<html><body>Bad gateway</body></html>",
        b'{"choices":[',
        b"[1, 2]",
        b'"text"',
        b"{}",
        b'{"choices":null}',
        b'{"choices":["\xff"]}',
        b'{"choices":[NaN]}',
        b'{"choices":' + b"[" * 100_000,
    ],
)
def test_a_success_that_is_none_is_an_invalid_answer(body):
    outcome = read(200, body)
    assert isinstance(outcome, Fault)
    assert outcome.kind is FaultKind.INVALID_ANSWER
    assert len(outcome.message) < 400


def test_a_web_page_is_named_and_its_start_is_shown():
    outcome = read(200, b"<html><title>Sign in</title>" + b"x" * 1000)
    assert "web page" in outcome.message
    assert "<title>Sign in</title>" in outcome.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (408, FaultKind.TIMEOUT),
        (409, FaultKind.SERVER_ERROR),
        (425, FaultKind.SERVER_ERROR),
        (429, FaultKind.RATE_LIMITED),
        (500, FaultKind.SERVER_ERROR),
        (503, FaultKind.SERVER_ERROR),
        (302, FaultKind.INVALID_ANSWER),
    ],
)
def test_what_may_succeed_later_is_a_fault(status, kind):
    body = b'{"error":{"message":"Slow down.","type":"t","param":null,"code":null}}'
    outcome = read(status, body, {"Retry-After": "2"})
    assert isinstance(outcome, Fault)
    assert outcome.kind is kind
    if status >= 400:
        assert outcome.status_code == status
        assert outcome.body == body
        assert outcome.retry_after_s == 2
        assert "Slow down." in outcome.message


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_what_the_request_did_wrong_is_an_answer(status):
    body = b'{"error":{"message":"No.","type":"t","param":null,"code":null}}'
    assert read(status, body) == Answer(status, body)


def test_a_conflict_that_is_final_is_an_answer():
    assert isinstance(read(409, b"{}", {"x-should-retry": "false"}), Answer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body"],"msg":"missing"}]}', '[{"loc": ["body"], "msg": "missing"}]'),
        (b'{"object":"error","message":"Too long.","type":"BadRequestError","code":400}', "Too long."),
        (b'{"error":"model not loaded"}', "model not loaded"),
        (b"<html>nope</html>", "The upstream answered 422. Its answer begins: <html>nope</html>"),
        (b"", "The upstream answered 422. Its answer begins: "),
        (b'{"error": {"message": "\xff"}}', None),
    ],
)
def test_any_error_body_becomes_the_envelope(body, message):
    outcome = read(422, body)
    error = json.loads(outcome.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if message is not None:
        assert error["message"] == message


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("null", 502, FaultKind.SERVER_ERROR),
        ("429", 429, FaultKind.RATE_LIMITED),
        ('"x"', 502, FaultKind.SERVER_ERROR),
    ],
)
def test_an_error_inside_a_200_is_a_fault(code, status, kind):
    outcome = read(
        200, b'{"error":{"message":"Out of memory.","type":"e","param":null,"code":%b}}' % code.encode()
    )
    assert (outcome.kind, outcome.status_code) == (kind, status)
    assert "Out of memory." in outcome.message


def test_a_400_inside_a_200_is_the_requests_fault():
    assert read(200, b'{"error":{"message":"Bad.","code":400}}').status_code == 400


def test_a_refused_key_ends_the_engine_and_names_the_variable():
    with pytest.raises(EngineError, match="OPENAI_API_KEY"):
        read(401, b'{"error":{"message":"Incorrect API key provided."}}')


@pytest.mark.parametrize("body", [b"<html>404</html>", b'{"detail":"Not Found"}', b""])
@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_the_path_ends_the_engine(status, body):
    with pytest.raises(EngineError, match="Is the base URL right"):
        read(status, body)


def test_an_exhausted_quota_ends_the_engine():
    with pytest.raises(EngineError, match="insufficient_quota"):
        read(
            429,
            b'{"error":{"message":"You exceeded your quota.","type":"insufficient_quota","code":"insufficient_quota"}}',
        )


@given(
    st.sampled_from(Endpoint),
    st.integers(200, 599).filter(lambda status: status not in (401, 404, 405, 429)),
    st.binary(max_size=60)
    | st.sampled_from([GOOD, b'{"error":{}}', b'{"error":[]}', b'{"usage":{"prompt_tokens":-1}}']),
    st.dictionaries(
        st.sampled_from(["Retry-After", "retry-after-ms", "x-should-retry"]), st.text(max_size=12)
    ),
)
def test_no_reply_is_a_traceback(endpoint, status, body, headers):
    outcome = read_outcome(endpoint, status, headers, body, wall_s=NOW)
    if isinstance(outcome, Answer):
        assert isinstance(json.loads(outcome.body.decode("utf-8")), dict)
        assert not 300 <= outcome.status_code < 400
    else:
        assert outcome.message
        assert outcome.retry_after_s is None or outcome.retry_after_s > 0


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "7", "retry-after-ms": "250"}, 0.25),
        ({"Retry-After": formatdate(NOW + 30, usegmt=True)}, 30.0),
        ({"Retry-After": formatdate(NOW - 30, usegmt=True)}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "soon"}, None),
    ],
)
def test_how_long_the_upstream_asks_to_wait(headers, wait_s):
    assert retry_after_s(headers, NOW) == wait_s


@pytest.mark.parametrize("name", ["cached_tokens"])
def test_usage_reads_the_same_either_way(name):
    raw = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {name: 1}}
    assert usage_of(raw) == Usage(3, 4, 1)
    assert UsageFields(prompt_tokens=3, completion_tokens=4).usage() == usage_of(
        {"input_tokens": 3, "output_tokens": 4}
    )


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        (" https://api.example.com/v1/ ", "https://api.example.com/v1"),
        ("https://example.com/proxy", "https://example.com/proxy/v1"),
        ("https://example.com/v1beta/openai", "https://example.com/v1beta/openai"),
        ("http://localhost:8000/v1/chat/completions", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/embeddings", "http://localhost:8000/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_base_urls(given, used):
    assert read_base_url(given) == used


@pytest.mark.parametrize(
    "given", ["", "localhost:8000", "ftp://x/v1", "http://", "http://h:99999", "http://h/v1?key=1", "//h/v1"]
)
def test_a_base_url_that_is_none_is_refused(given):
    with pytest.raises(UsageError, match="http://"):
        read_base_url(given)


def test_a_password_is_not_shown():
    assert without_password("http://me:secret@h:1/v1") == "http://h:1/v1"
