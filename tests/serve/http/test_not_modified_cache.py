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
def cache() -> NotModifiedCache:
    nothing: Any = None
    return NotModifiedCache(nothing, nothing, nothing)


def remember(cache: NotModifiedCache, asked: dict[str, Any]) -> None:
    cache.remember(asked, ANONYMOUS, cast("Any", None), 1, [])


def test_request_with_a_large_head_is_not_remembered(cache: NotModifiedCache) -> None:
    remember(cache, scope(1, MAX_HEAD))
    many = scope(2) | {"headers": [(b"a", b"")] * 200}  # small headers take memory too
    remember(cache, many)
    assert not len(cache._known)
    remember(cache, scope(3, MAX_HEAD // 2))
    assert len(cache._known) == 1


def test_remembered_requests_have_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_modified_cache, "MAX_BYTES", 10 * MAX_HEAD)
    nothing: Any = None
    cache = NotModifiedCache(nothing, nothing, nothing)
    most = 0
    for number in range(100):
        remember(cache, scope(number, MAX_HEAD // 2))
        remember(cache, scope(number, MAX_HEAD // 2))  # the same one counts once
        most = max(most, len(cache._known))
    assert 10 <= most < 20
