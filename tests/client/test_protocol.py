"""Requests and answers: addresses, credentials, errors by their code, and which requests may be retried."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater import errors
from headwater.client.protocol import (
    RetryPolicy,
    error_of,
    find_token,
    get_request,
    may_repeat,
    offset_expired,
    parse_url,
    ranges_of,
    refusal,
    rpc_request,
    rpc_result,
)
from headwater.errors import ConfigError, HeadwaterError, OffsetExpired, StaleEpoch, Unavailable
from headwater.model.keys.key import Span
from headwater.serve.rpc.envelope import error_body
from headwater.serve.server.application import problem


def every_kind(kind: type[HeadwaterError] = HeadwaterError) -> Iterator[type[HeadwaterError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every_kind(below)


KINDS = [kind for kind in every_kind() if kind.__module__ == errors.__name__]


def test_error_kinds_of_the_client_are_exactly_the_shared_kinds() -> None:

    assert set(errors.CLASSES.values()) == set(KINDS)


def example_error(kind: type[HeadwaterError]) -> HeadwaterError:
    """Return an error of this class with a hint and further fields."""
    if kind is OffsetExpired:
        error = OffsetExpired(3, 10, 90)
        error.extra["resnapshot_reason"] = "wal_horizon_exceeded"
        return error
    return kind("it is so", hint="Do this.", ranges=[1, 2], place="beside")


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_error_survives_rpc_and_problem_encoding_unchanged(kind: type[HeadwaterError]) -> None:
    told = example_error(kind)
    with pytest.raises(kind) as raised:
        rpc_result(200, {}, error_body(1, told))
    for error in (raised.value, refusal(kind.status, {}, problem(told, kind.status))):
        assert type(error) is kind
        assert (error.message, error.hint, error.extra) == (told.message, told.hint, told.extra)
        assert str(error) == told.message


def test_expired_offset_error_keeps_its_offsets_and_reason() -> None:
    error = refusal(410, {}, problem(example_error(OffsetExpired), 410))
    assert isinstance(error, OffsetExpired)
    assert (error.horizon, error.latest, error.after) == (10, 90, 9)
    assert error.extra["resnapshot_reason"] == "wal_horizon_exceeded"


@pytest.mark.parametrize("name", ["reason", "resnapshot_reason"])
def test_expired_offset_from_a_page_or_a_stream_raises_the_same_error(name: str) -> None:
    told = {
        "earliest_offset": 7,
        "latest_offset": 9,
        "resnapshot_from_offset": 6,
        name: "snapshot_expired",
        "events": [],
    }
    error = offset_expired(told)
    assert isinstance(error, OffsetExpired)
    assert (error.after, error.horizon, error.latest) == (6, 7, 9)
    assert error.extra["resnapshot_reason"] == "snapshot_expired"
    assert "events" not in error.extra


def test_unknown_error_code_is_kept_and_its_retryable_flag_is_obeyed() -> None:
    error = error_of("moon_is_full", "wait", {"retryable": True, "phase": 3})
    assert type(error) is HeadwaterError
    assert (error.extra["code"], error.extra["phase"]) == ("moon_is_full", 3)
    assert may_repeat(RetryPolicy.REFUSED, error)
    assert not may_repeat(RetryPolicy.REFUSED, error_of("moon_is_full", "wait", {}))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(502, Unavailable), (503, Unavailable), (429, Unavailable), (401, errors.Unauthorized), (403, errors.Forbidden)]
    + [(404, errors.NotFound), (302, errors.InvalidRequest), (200, errors.InvalidRequest)],
)
@pytest.mark.parametrize("body", [b"<html>", b"", b"[1]", b"{}", b"[" * 100_000])
def test_answer_of_a_proxy_is_mapped_to_an_error_class(status: int, kind: type[HeadwaterError], body: bytes) -> None:
    assert type(refusal(status, {}, body)) is kind
    with pytest.raises(kind):
        rpc_result(status, {}, body)


def test_retry_after_is_read_in_seconds_and_dates_are_ignored() -> None:
    assert refusal(503, {"retry-after": "7"}, b"").extra["retry_after"] == 7
    assert "retry_after" not in refusal(503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"").extra


# --- repeats ---------------------------------------------------------------------------------------------


def test_writes_are_retried_only_when_surely_not_executed() -> None:
    unsent, cut, busy, wrong = (
        Unavailable("x", sent=False),
        Unavailable("x", sent=True),
        errors.Busy("x"),
        errors.Conflict("x"),
    )
    allowed = {
        repeat: [may_repeat(repeat, error) for error in (unsent, cut, busy, wrong)]
        for repeat in (RetryPolicy.ANY, RetryPolicy.REFUSED, RetryPolicy.UNSENT)
    }
    assert allowed == {
        RetryPolicy.ANY: [True, True, True, False],
        RetryPolicy.REFUSED: [True, False, True, False],
        RetryPolicy.UNSENT: [True, False, False, False],
    }


@pytest.mark.parametrize(
    ("method", "params", "repeat"),
    [
        ("data.get", {}, RetryPolicy.ANY),
        ("cdc.poll", {"sub_id": "s"}, RetryPolicy.ANY),
        ("pull.register", {}, RetryPolicy.ANY),
        ("sql.exec", {"sql": "SELECT 1"}, RetryPolicy.REFUSED),
        ("data.insert", {}, RetryPolicy.REFUSED),
        ("something.new", {}, RetryPolicy.REFUSED),
        ("data.insert", {"tx": "tx_1"}, RetryPolicy.UNSENT),
        ("data.get", {"tx": "tx_1"}, RetryPolicy.UNSENT),
        ("tx.commit", {"tx_id": "tx_1"}, RetryPolicy.UNSENT),
    ],
)
def test_rpc_method_is_assigned_its_retry_class(method: str, params: dict[str, Any], repeat: RetryPolicy) -> None:
    assert rpc_request(method, params).repeat is repeat


# --- requests --------------------------------------------------------------------------------------------


def test_rpc_call_omits_none_parameters_and_waits_for_its_wait_ms() -> None:
    request = rpc_request("cdc.poll", {"sub_id": "s", "limit": None, "wait_ms": 2500})
    assert json.loads(request.body or b"") == {
        "id": 1,
        "method": "cdc.poll",
        "params": {"sub_id": "s", "wait_ms": 2500},
    }
    assert request.wait_seconds == 2.5


def test_names_and_filters_are_encoded_as_the_server_parses_them() -> None:
    from headwater.serve.http.query_string import changes_asked, parse_query
    from headwater.serve.http.routes import find

    given = {
        "pk_range": {"lower_bound": 1},
        "spans": [{"prefix": [1]}],
        "ops": ["insert", "delete"],
        "include": {"before": True, "after": False},
        "shard": {"index": 0, "of": 4},
        "where": "total > 100 AND name = 'ä&b'",
        "start": None,
        "upto": 9,
    }
    request = get_request(["changes", "main", "a/b ü?\udcff"], given, "text/event-stream", "12")
    assert request.headers["last-event-id"] == "12"
    path, _, query = request.path.partition("?")
    route, values = find(path, path.encode())
    assert route is not None and values == {"db": "main", "table": "a/b ü?\udcff"}
    params, upto = changes_asked(values, parse_query(query.encode(), route.query, route.path))
    assert upto == 9 and params.where == given["where"] and params.ops == ["insert", "delete"]
    assert params.shard == {"index": 0, "of": 4} and params.include == {"before": True}
    assert params.spans == [{"prefix": [{"t": "i64", "v": 1}]}]


def test_names_with_commas_are_encoded_as_json() -> None:
    from headwater.serve.http.handlers.pull_query_string import names_in
    from headwater.serve.http.query_string import parse_query

    for names in (("a", "b"), ("a,b", "c"), (" a",), ("[a]",), ("ü b",)):
        request = get_request(["pull"], {"columns": names}, "")
        query = parse_query(request.path.partition("?")[2].encode(), ("columns",), "")
        assert names_in(query, "columns") == names


def test_keys_are_encoded_as_hex() -> None:
    assert get_request(["pull"], {"after": b"\x01\xff", "start": b""}, "").path == "/api/v1/pull?after=01ff&start="
    found = ranges_of(
        [{"id": 2, "epoch": 1, "start": "ff"}, {"id": 1, "epoch": 3, "start": "", "end": "ff", "rows": 5}]
    )
    assert [(range.id, range.span, range.rows) for range in found] == [
        (1, Span(b"", b"\xff"), 5),
        (2, Span(b"\xff", None), 0),
    ]


# --- where and who ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port"),
    [
        ("http://127.0.0.1:7171", "http", "127.0.0.1", 7171),
        ("127.0.0.1:7171/", "http", "127.0.0.1", 7171),
        ("https://[::1]:1", "https", "::1", 1),
        ("https://example.org", "https", "example.org", None),
    ],
)
def test_server_url_is_parsed_into_scheme_host_and_port(url: str, scheme: str, host: str, port: int | None) -> None:
    assert parse_url(url)[:3] == (scheme, host, port)


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "http://a/path", "http://a:99999", "http://a:x", "http://a?b=1", "http://a#b", ""]
)
def test_invalid_server_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@a:1",
        "http://hunter2@a",
        "http://:hunter2@a/path",
        "http://a?token=hunter2",
        "http://me:x/hunter2@a",
        "me:x/hunter2@a",
    ],
)
def test_server_url_with_a_password_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_url(url)
    assert "hunter2" not in repr(raised.value) + raised.value.hint


def test_token_is_taken_from_argument_then_file_then_environment(tmp_path: Path) -> None:
    file, environ = tmp_path / "token", {"HEADWATER_TOKEN": "c"}
    file.write_text("b\n")
    assert find_token("a", file, environ) == "a"
    assert find_token(None, file, environ) == "b"
    assert find_token(None, None, environ) == "c"
    assert find_token(None, None, {"HEADWATER_TOKEN": ""}) is None


@pytest.mark.parametrize("token", ["hunter2\r\nx: y", "hunter2ü", "", "  ", "hunter2\n"])
def test_token_invalid_in_a_header_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_token(token, None, {})
    assert "hunter2" not in repr(raised.value) + repr(raised.value.extra)


def test_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        find_token(None, tmp_path / "nowhere", {})


def test_stale_epoch_error_includes_the_current_ranges() -> None:
    body = problem(StaleEpoch("split", ranges=[{"id": 1, "epoch": 2, "start": "", "end": "05"}]), 409)
    error = refusal(409, {}, body)
    assert isinstance(error, StaleEpoch)
    assert ranges_of(error.extra["ranges"])[0].span == Span(b"", b"\x05")
