"""A browser's EventSource receives changes, loses the server, and resumes without gap or repeat."""

from collections.abc import Callable

import pytest
from tests.browser.chromium import Browser, wait_for
from tests.browser.restartable_server import KeptServer

pytestmark = pytest.mark.slow
CONNECTING, CLOSED = 0, 2
Serve = Callable[..., KeptServer]


def texts(upto: int) -> list[str]:
    """Return the ids of all changes up to offset `upto`; offset 1 is CREATE TABLE."""
    return [str(offset) for offset in range(2, upto + 1)]


@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_event_source_resumes_by_itself_after_a_server_restart(browser: Browser, serve: Serve, ends: str) -> None:
    server = serve()
    sub_id = server.subscribe()
    browser.run("follow(arguments[0])", server.sse(sub_id))
    server.insert(1, 2)
    server.ask("sql.exec", sql="UPDATE orders SET status = 'paid' WHERE id = 1")
    server.ask("sql.exec", sql="DELETE FROM orders WHERE id = 2")
    browser.until("changes().length >= 4")
    frames = browser.value("changes()")
    assert [frame["event"] for frame in frames] == ["insert", "insert", "update", "delete"]
    assert all(frame["id"] == str(frame["data"]["offset"]) for frame in frames)
    assert frames[2]["data"]["after"] == {"id": 1, "status": "paid"}

    getattr(server, ends)()
    browser.until(f"errors.length && source.readyState === {CONNECTING}")
    server.insert_meanwhile(3, 4)
    server.start()
    server.insert(5)
    browser.until("changes().length >= 7")

    assert browser.ids() == texts(8)
    assert browser.value("opened.length") == 2
    # Had the browser not named where it was, everything after the acked cursor would have come again.
    assert server.stored_subscription(sub_id)["acked_offset"] == 1


def test_event_source_with_an_expired_ticket_ends_and_a_new_ticket_continues(browser: Browser, serve: Serve) -> None:
    server = serve("serve.ticket_seconds = 10", token="s3cret")
    sub_id = server.subscribe()
    browser.run("follow(arguments[0])", server.sse(sub_id))
    browser.until(f"errors.length === 1 && source.readyState === {CLOSED}")  # no ticket, no way in

    follow_with_ticket(browser, server, sub_id)
    server.insert(1, 2)
    browser.until("changes().length >= 2")
    browser.until("Date.now() > expires_at_ms")
    server.insert(3)  # a stream that is open stays open
    browser.until("changes().length >= 3")

    server.kill()
    server.insert_meanwhile(4)
    server.start()
    browser.until(f"source.readyState === {CLOSED}")  # it came back with the old ticket
    follow_with_ticket(browser, server, sub_id, "&from_offset=" + browser.ids()[-1])
    server.insert(5)
    browser.until("changes().length >= 5")
    assert browser.ids() == texts(6)


def follow_with_ticket(browser: Browser, server: KeptServer, sub_id: str, more: str = "") -> None:
    """Follow as a page that knows the token: its origin differs, so the browser sends a preflight request first."""
    browser.run(
        """const [base, token, url, more] = arguments;
        return ask(base, token, "security.ticket.create").then(found => {
          window.expires_at_ms = found.expires_at_ms;
          follow(`${url}?ticket=${found.ticket}${more}`);
        })""",
        server.url,
        server.token,
        server.sse(sub_id),
        more,
    )
    browser.until("source.readyState === 1")


def test_event_source_of_a_closed_subscription_stops_reconnecting(browser: Browser, serve: Serve) -> None:
    server = serve()
    sub_id = server.subscribe()
    browser.run("follow(arguments[0])", server.sse(sub_id))
    browser.until("opened.length === 1")
    server.ask("cdc.close", sub_id=sub_id)
    browser.until(f"source.readyState === {CLOSED}")
    assert browser.value("opened.length") == 1


def test_closed_tab_leaves_no_open_stream(browser: Browser, serve: Serve) -> None:
    server = serve()
    browser.run("follow(arguments[0])", server.sse(server.subscribe()))
    browser.until("opened.length === 1")
    wait_for(lambda: server.streams() == 1, lambda: f"one stream; there are {server.streams()}")
    browser.visit("about:blank")
    wait_for(lambda: server.streams() == 0, lambda: f"no stream; there are {server.streams()}")
