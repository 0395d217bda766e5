"""Cache headers of query answers, as docs/caching.md documents them."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.caches.conftest import PUBLIC
from tests.guarantees.server_process import ServerProcess
from tests.soundness.counters import rpc
from tests.suite.deadlines import wait_until

pytestmark = pytest.mark.slow
TABLE = "CREATE TABLE orders (id INTEGER PRIMARY KEY, total REAL)"


@pytest.mark.parametrize(("settings", "kept"), [("", "private, no-cache"), (PUBLIC, "public, no-cache")])
def test_query_answer_has_the_cache_headers_of_its_settings(
    serve: Callable[..., ServerProcess], settings: str, kept: str
) -> None:
    server = serve(settings)
    rpc(server.url, "sql.exec", sql=TABLE)

    def ask(sql: str, **headers: str) -> httpx.Response:
        query = rpc(server.url, "query.prepare", sql=sql)["query_id"]
        return httpx.get(f"{server.url}/api/v1/q/{query}", headers=headers)

    def says(answer: httpx.Response) -> tuple[str | None, ...]:
        return tuple(answer.headers.get(name) for name in ("cache-control", "vary", "cache-groups"))

    rows = "SELECT * FROM orders ORDER BY id"
    wait_until(lambda: "etag" in ask(rows).headers, "the log has the new table")
    first = ask(rows)
    assert says(first) == (kept, "Accept, A-IM", '"main.orders"')
    again = ask(rows, **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, says(again), again.headers["etag"]) == (304, says(first), first.headers["etag"])

    floor = ask(rows, **{"x-headwater-causality": first.headers["x-headwater-causality"]})
    volatile = ask("SELECT random() FROM orders")
    assert (floor.headers["cache-control"], volatile.headers["cache-control"]) == ("no-store", "no-store")
    assert "etag" not in volatile.headers

    ask(rows, **{"a-im": "headwater-rows"})
    rpc(server.url, "sql.exec", sql="INSERT INTO orders VALUES (1, 9.5)")
    patch = ask(rows, **{"a-im": "headwater-rows", "if-none-match": first.headers["etag"]})
    assert (patch.status_code, patch.headers["cache-control"]) == (226, "no-store")
