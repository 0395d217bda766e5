"""Requests that are remembered for their 304: how much memory they may take."""

from typing import Any, cast

import pytest

from headwater.model.principal import ANONYMOUS
from headwater.serve.http import not_modified_cache
from headwater.serve.http.not_modified_cache import MAX_HEAD, NotModifiedCache


def scope(number: int, size: int = 0) -> dict[str, Any]:
    headers = [(b"host", b"x"), (b"x-pad", b"x" * size)]
    return {"raw_path": b"/api/v1/q/%d" % number, "query_string": b"", "method": "GET", "headers": headers}


@pytest.fixture
def known() -> NotModifiedCache:
    nothing: Any = None
    return NotModifiedCache(nothing, nothing, nothing)


def remember(known: NotModifiedCache, asked: dict[str, Any]) -> None:
    known.remember(asked, ANONYMOUS, cast("Any", None), 1, [])


def test_request_with_a_large_head_is_not_remembered(known: NotModifiedCache) -> None:
    remember(known, scope(1, MAX_HEAD))
    many = scope(2) | {"headers": [(b"a", b"")] * 200}  # small headers take memory too
    remember(known, many)
    assert not len(known._known)
    remember(known, scope(3, MAX_HEAD // 2))
    assert len(known._known) == 1


def test_remembered_requests_have_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_modified_cache, "MAX_BYTES", 10 * MAX_HEAD)
    nothing: Any = None
    known = NotModifiedCache(nothing, nothing, nothing)
    most = 0
    for number in range(100):
        remember(known, scope(number, MAX_HEAD // 2))
        remember(known, scope(number, MAX_HEAD // 2))  # the same one counts once
        most = max(most, len(known._known))
    assert 10 <= most < 20
