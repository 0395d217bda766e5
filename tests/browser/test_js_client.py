"""The JavaScript client in a browser, on a real server: a query stays fresh by tags, events and patches."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.chromium import Browser, wait_for
from tests.browser.js_site import Site
from tests.browser.restartable_server import KeptServer

from headwater.serve.http.routes import ROUTES

if not any(route.path == "/api/v1/q/{query_id}/events" for route in ROUTES):
    pytest.skip("the routes of queries are not served yet", allow_module_level=True)

pytestmark = pytest.mark.slow
Serve = Callable[..., KeptServer]
SQL = "SELECT id, status FROM orders WHERE status = ? ORDER BY id"


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    site = Site()
    browser.visit(site.url)
    browser.until("window.headwater !== undefined")
    yield browser
    browser.visit("about:blank")
    site.close()


def live(page: Browser, server: KeptServer, sql: str = SQL, args: Any = ("new",), **options: Any) -> None:
    """Open a live query on the page; wait for its first answer and its event stream."""
    found = server.ask("query.prepare", sql=sql)
    page.run("live(arguments[0])", {"url": server.url, "queryId": found["query_id"], "args": args, **options})
    page.until("query.answer !== null && opened.at(-1) === 'live'")


def until_rows(page: Browser, rows: list[list[Any]]) -> None:
    text = json.dumps(rows, separators=(",", ":"))
    page.until(f"JSON.stringify(query.answer.rows) === {json.dumps(text)}")


def orders(server: KeptServer) -> list[list[Any]]:
    found = server.ask("sql.exec", sql="SELECT id, status FROM orders WHERE status = 'new' ORDER BY id")
    return [[cell["v"] for cell in row] for row in found["result"]["data"]["rows"]]


def test_writes_reach_the_page_as_patches_and_unrelated_writes_cause_no_request(page: Browser, serve: Serve) -> None:
    server = serve()
    server.insert(1, 2)
    live(page, server)
    until_rows(page, [[1, "new"], [2, "new"]])
    server.insert(3)
    until_rows(page, [[1, "new"], [2, "new"], [3, "new"]])
    server.ask("sql.exec", sql="UPDATE orders SET status = 'paid' WHERE id = 1")
    until_rows(page, [[2, "new"], [3, "new"]])
    counts = page.value("query.counts")
    assert counts["patched"] == 2 and counts["whole"] == 1 and counts["mismatches"] == 0, counts

    server.ask("sql.exec", sql="UPDATE orders SET status = 'sent' WHERE id = 1")  # outside, before and after
    server.insert(4)
    until_rows(page, [[2, "new"], [3, "new"], [4, "new"]])
    assert page.value("query.counts.asked") == counts["asked"] + 1
    assert page.value("errors") == []


@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_live_query_is_current_again_after_a_server_restart(page: Browser, serve: Serve, ends: str) -> None:
    server = serve()
    server.insert(1)
    live(page, server)
    getattr(server, ends)()
    page.until("opened.at(-1) === 'connecting'")
    server.insert_meanwhile(2)
    server.start()
    until_rows(page, [[1, "new"], [2, "new"]])
    page.until("opened.at(-1) === 'live'")
    server.insert(3)
    until_rows(page, [[1, "new"], [2, "new"], [3, "new"]])


def test_live_query_equals_the_database_after_a_burst_of_writes(page: Browser, serve: Serve, fresh_seed: str) -> None:
    rng = random.Random(fresh_seed)
    server = serve()
    live(page, server)
    for _ in range(150):
        id, status = rng.randrange(30), rng.choice(["new", "paid"])
        if rng.random() < 0.2:
            server.ask("sql.exec", sql=f"DELETE FROM orders WHERE id = {id}")
        else:
            server.ask("sql.exec", sql=f"INSERT OR REPLACE INTO orders VALUES ({id}, '{status}')")
    until_rows(page, orders(server))
    counts = page.value("query.counts")
    assert counts["mismatches"] == 0 and counts["patched"] > 0 and page.value("errors") == [], counts


def test_live_query_without_a_key_follows_writes_without_mismatches(page: Browser, serve: Serve) -> None:
    server = serve()
    server.insert(1, 2)
    live(page, server, "SELECT status FROM orders WHERE status = ?")
    server.insert(3)
    until_rows(page, [["new"]] * 3)
    assert page.value("query.counts.mismatches") == 0


def test_closed_live_query_leaves_no_open_stream(page: Browser, serve: Serve) -> None:
    server = serve()
    live(page, server)
    page.run("query.close()")
    wait_for(lambda: server.streams() == 0, lambda: f"no stream; there are {server.streams()}")


def test_live_query_with_a_credential_works_by_header_and_tickets(page: Browser, serve: Serve) -> None:
    server = serve(token="s3cret")
    server.insert(1)
    found = server.ask("query.prepare", sql=SQL)
    page.run(
        """const [url, token, queryId] = arguments, headers = {authorization: `Bearer ${token}`};
        const ask = {id: 1, method: "security.ticket.create", params: {}};
        const asked = {method: "POST", body: JSON.stringify(ask)};
        const post = () => fetch(`${url}/api/v1/rpc`,
          {...asked, headers: {...headers, "content-type": "application/json"}}).then(answer => answer.json());
        live({url, queryId, args: ["new"], headers, ticket: async () => (await post()).result.ticket});""",
        server.url,
        server.token,
        found["query_id"],
    )
    page.until("query.answer !== null && opened.at(-1) === 'live'")
    server.insert(2)
    until_rows(page, [[1, "new"], [2, "new"]])
