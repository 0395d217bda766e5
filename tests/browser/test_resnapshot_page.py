"""A page behind the horizon is told to resnapshot, fetches the rows, and continues from them."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.browser.chromium import Browser, wait_for
from tests.browser.restartable_server import KeptServer

pytestmark = pytest.mark.slow
Serve = Callable[..., KeptServer]
RETAINED = 10
ROWS = 40


@pytest.fixture(params=["", "s3cret"], ids=["open", "locked"])
def outrun(request: pytest.FixtureRequest, serve: Serve) -> tuple[KeptServer, str]:
    """Return a server, and a subscription whose changes were evicted."""
    server = serve(f"log.retention_events = {RETAINED}", token=request.param)
    sub_id = server.subscribe()
    server.insert(*range(1, ROWS + 1))
    wait_for(
        lambda: server.stored_subscription(sub_id)["state"] == "resnapshot_required",
        lambda: f"the loss: {server.stored_subscription(sub_id)}",
    )
    return server, sub_id


def ticket(browser: Browser, server: KeptServer) -> str:
    """Return the query string with a ticket; "" if the server has no credential."""
    if not server.token:
        return ""
    found = browser.run("return ask(arguments[0], arguments[1], 'security.ticket.create')", server.url, server.token)
    return f"ticket={found['ticket']}"


def check_told(told: dict[str, Any]) -> None:
    assert told["data"]["reason"] == "wal_horizon_exceeded"
    assert told["data"]["latest_offset"] == ROWS + 1
    assert int(told["id"]) == told["data"]["resnapshot_from_offset"] == told["data"]["earliest_offset"] - 1


def test_event_source_behind_the_horizon_receives_resnapshot_and_continues_from_the_rows(
    browser: Browser, outrun: tuple[KeptServer, str]
) -> None:
    server, sub_id = outrun
    entry = ticket(browser, server)
    browser.run("follow(arguments[0])", f"{server.sse(sub_id)}?{entry}".rstrip("?"))
    browser.until("controls('resnapshot').length === 1")
    told = browser.value("controls('resnapshot')[0]")
    check_told(told)
    assert browser.ids() == []

    url = server.url + told["data"]["snapshot_url"]
    found = browser.run("return rows(arguments[0], arguments[1])", url, server.token)
    assert (found["status"], found["kind"]) == (200, "application/x-ndjson") and found["etag"]
    assert found["rows"] == [{"id": id, "status": "new"} for id in range(1, ROWS + 1)]

    onward = f"{server.sse(sub_id)}?from_offset={found['offset']}&{entry}".rstrip("&")
    browser.run("follow(arguments[0])", onward)
    server.insert(ROWS + 1)
    browser.until("changes().length >= 1")
    assert browser.ids() == [str(ROWS + 2)]
    assert len(browser.value("controls('resnapshot')")) == 1


def test_web_socket_behind_the_horizon_receives_resnapshot_and_is_closed_with_4410(
    browser: Browser, outrun: tuple[KeptServer, str]
) -> None:
    server, sub_id = outrun
    browser.run("again = false; listen(arguments[0])", f"{server.ws(sub_id)}?{ticket(browser, server)}".rstrip("?"))
    browser.until("closes.length === 1")
    told = browser.value("controls('resnapshot')[0]")
    check_told(told)
    close = browser.value("closes[0]")
    assert (close["code"], close["clean"]) == (4410, True) and close["reason"].startswith("resnapshot_required")


@pytest.mark.parametrize("by", ["ticket", "header"])
def test_page_follows_the_redirect_of_a_snapshot_url_without_a_version(
    browser: Browser, outrun: tuple[KeptServer, str], by: str
) -> None:
    server, _ = outrun
    url = f"{server.url}/api/v1/snapshot/main/orders"
    if by == "ticket":
        found = browser.run("return rows(arguments[0])", f"{url}?{ticket(browser, server)}".rstrip("?"))
    else:
        found = browser.run("return rows(arguments[0], arguments[1])", url, server.token)
    assert found["status"] == 200 and len(found["rows"]) == ROWS
