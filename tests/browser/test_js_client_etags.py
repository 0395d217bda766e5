"""The JavaScript client in a browser by tags alone, without patches: a 304 while the rows are the same, never after."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.chromium import Browser
from tests.browser.js_site import Site
from tests.browser.restartable_server import KeptServer

pytestmark = pytest.mark.slow
Serve = Callable[..., KeptServer]


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    site = Site()
    browser.visit(site.url)
    browser.until("window.headwater !== undefined")
    yield browser
    browser.visit("about:blank")
    site.close()


def refreshed(page: Browser) -> tuple[Any, dict[str, int]]:
    """Refresh the query; return its rows, and the number of answers by kind."""
    rows, counts = page.run("return query.refresh().then(() => [query.answer.rows, query.counts])")
    return rows, counts


def test_live_query_refresh_is_answered_with_304_until_the_rows_differ(page: Browser, serve: Serve) -> None:
    server = serve()
    server.insert(1)
    found = server.ask("query.prepare", sql="SELECT id, status FROM orders WHERE status = ? ORDER BY id")
    options = {"url": server.url, "queryId": found["query_id"], "args": ["new"], "patches": False}
    page.run("live(arguments[0])", options)
    page.until("query.answer !== null")
    before = page.value("query.counts.notModified")
    rows, counts = refreshed(page)
    assert rows == [[1, "new"]] and counts["notModified"] > before
    server.insert(2)
    rows, counts = refreshed(page)
    assert rows == [[1, "new"], [2, "new"]], json.dumps(counts)
    assert counts["whole"] == 2 and counts["patched"] == counts["mismatches"] == 0
    assert page.value("errors") == []


def test_unknown_live_query_is_closed_with_the_error_of_the_server(page: Browser, serve: Serve) -> None:
    server = serve()
    page.run("live({url: arguments[0], queryId: 'q_nobody'})", server.url)
    page.until("errors.length === 1 && query.closed")
    assert "unknown query_id" in page.value("errors[0]")
