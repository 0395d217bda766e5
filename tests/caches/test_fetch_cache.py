"""A browser's own cache: a page that fetches a query's URL gets the right rows, revalidated by 304."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import httpx
import pytest
from tests.browser.chromium import Browser, programs
from tests.browser.page_server import PageServer
from tests.guarantees.server_process import ServerProcess
from tests.soundness.counters import rpc

pytestmark = pytest.mark.slow
MISSING = "NO BROWSER, so its cache was not tried: `make browser`, or install chromium and chromium-driver"
FETCH = "return fetch(arguments[0], {cache: arguments[1]}).then(a => a.json().then(body => [a.status, body]))"


@pytest.fixture
def page() -> Iterator[Browser]:
    """Yield a browser on a page of this machine."""
    found = programs()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    site, browser = PageServer(), Browser(*found)
    try:
        browser.visit(site.url())
        yield browser
    finally:
        browser.quit()
        site.close()


def numbers(server: ServerProcess) -> dict[str, float]:
    """Return how often a query was executed, and how often a 304 was enough."""
    lines = [line.split() for line in httpx.get(f"{server.url}/metrics").text.splitlines()]
    names = ("executed", "not_modified")
    return {name: float(line[1]) for name in names for line in lines if line[0] == f"headwater_query_{name}_total"}


@pytest.mark.parametrize("settings", ["", "[queries]\npublic = true\n"], ids=["private", "public"])
def test_browser_refetch_returns_current_rows_without_a_second_execution(
    page: Browser, serve: Callable[..., ServerProcess], settings: str
) -> None:
    server = serve(settings)
    rpc(server.url, "sql.exec", sql="CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER, note TEXT)")
    rpc(server.url, "sql.exec", sql="INSERT INTO orders VALUES (1, 0, NULL)")
    query = rpc(server.url, "query.prepare", sql="SELECT id, total FROM orders")["query_id"]
    url = f"{server.url}/api/v1/q/{query}"
    for mode in ("default", "no-cache"):
        for total in range(1, 4):
            rpc(server.url, "sql.exec", sql=f"UPDATE orders SET total = {total}")
            _, first = page.run(FETCH, url, mode)
            assert first["data"]["rows"][0][1]["v"] == total, "a write that was acknowledged is seen"
            rpc(server.url, "sql.exec", sql=f"UPDATE orders SET note = 'n{total}'")
            before = numbers(server)
            assert page.run(FETCH, url, mode) == [200, first]
            assert numbers(server) == {**before, "not_modified": before["not_modified"] + 1}
