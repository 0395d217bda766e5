"""Without a credential, a page of another site can read nothing, whichever name it uses for this machine."""

from collections.abc import Callable

import pytest
from tests.browser.chromium import EVIL_HOST, Browser
from tests.browser.page_server import PageServer
from tests.browser.restartable_server import KeptServer

pytestmark = pytest.mark.slow
Serve = Callable[..., KeptServer]
CLOSED = 2
SSE, WS, RPC = "/api/v1/cdc/sse/{sub_id}", "/api/v1/cdc/ws/{sub_id}", "/api/v1/rpc"


def knock(browser: Browser, server: KeptServer, sub_id: str, host: str = "127.0.0.1") -> None:
    """Try every kind of request from the open page; check that none succeeds."""
    browser.run("again = false; follow(arguments[0])", server.sse(sub_id).replace("127.0.0.1", host))
    browser.until(f"errors.length === 1 && source.readyState === {CLOSED}")
    browser.run("listen(arguments[0])", server.ws(sub_id).replace("127.0.0.1", host))
    browser.until("closes.length === 1")
    assert browser.value("closes[0].code") == 1006
    base = server.url.replace("127.0.0.1", host)
    assert browser.run("return fails(ask(arguments[0], '', 'cdc.list'))", base) != "succeeded"
    assert browser.run("return fails(rows(arguments[0] + '/api/v1/snapshot/main/orders'))", base) == "TypeError"
    # A simple request needs no permission to be sent: it must not be carried out.
    blind = "fetch(arguments[0] + '/api/v1/sql/exec', {method: 'POST', mode: 'no-cors', body: arguments[1]})"
    browser.run(f"return {blind}.then(() => null)", base, '{"sql": "DELETE FROM orders"}')
    assert browser.value("[opened, seen]") == [[], []]


def rows(server: KeptServer) -> int:
    found = server.ask("sql.exec", sql="SELECT count(*) FROM orders")
    return found["result"]["data"]["rows"][0][0]["v"]


def test_page_of_another_site_is_refused(browser: Browser, pages: PageServer, serve: Serve) -> None:
    server = serve()
    sub_id = server.subscribe()
    server.insert(1)
    browser.visit(pages.url(EVIL_HOST))
    knock(browser, server, sub_id)
    assert (server.refused(SSE), server.refused(WS)) == (1, 1), "the server refused, not the browser"
    assert rows(server) == 1


def test_page_of_a_site_that_resolves_to_this_machine_is_refused(
    browser: Browser, pages: PageServer, serve: Serve
) -> None:
    server = serve()
    sub_id = server.subscribe()
    server.insert(1)
    browser.visit(pages.url(EVIL_HOST))
    knock(browser, server, sub_id, host=EVIL_HOST)
    assert (server.refused(SSE), server.refused(WS)) == (1, 1), "the server refused, not the browser"
    assert rows(server) == 1


def test_page_served_under_a_foreign_host_name_is_refused(browser: Browser, serve: Serve) -> None:
    server = serve()
    sub_id = server.subscribe()
    page = f"{server.url.replace('127.0.0.1', EVIL_HOST)}/healthz"  # open to all, and now of one origin
    get = "fetch(arguments[0]).then(answer => answer.status)"
    browser.visit(page)
    failed = f"return {get}.then(() => 'succeeded', error => error.name)"
    assert browser.run(failed, f"/api/v1/cdc/sse/{sub_id}") == "TypeError"  # what the page says of itself stops it
    browser.heed_policies(False)
    try:
        browser.visit(page)
        assert browser.run(f"return {get}", f"/api/v1/cdc/sse/{sub_id}") == 403
        post = (
            "fetch('/api/v1/rpc', {method: 'POST', headers: {'content-type': 'application/json'}, body: arguments[0]})"
        )
        body = '{"id": 1, "method": "cdc.list", "params": {}}'
        assert browser.run(f"return {post}.then(answer => answer.status)", body) == 403
    finally:
        browser.heed_policies(True)
