"""A browser's WebSocket receives frames, acknowledges, pauses, loses the server and resumes."""

from collections.abc import Callable

import pytest
from tests.browser.chromium import Browser, wait_for
from tests.browser.restartable_server import KeptServer

pytestmark = pytest.mark.slow
SERVICE_RESTART, ABNORMAL, POLICY = 1012, 1006, 1008
Serve = Callable[..., KeptServer]


def numbers(upto: int) -> list[int]:
    """Return the ids of all changes up to offset `upto`; offset 1 is CREATE TABLE."""
    return list(range(2, upto + 1))


def test_web_socket_acknowledges_and_resumes_after_a_server_restart(browser: Browser, serve: Serve) -> None:
    server = serve()
    sub_id = server.subscribe()
    browser.run("listen(arguments[0])", server.ws(sub_id))
    server.insert(1, 2)
    browser.until("changes().length >= 2")
    frames = browser.value("changes()")
    assert all(set(frame) == {"id", "event", "data"} and frame["event"] == "insert" for frame in frames)
    assert [frame["id"] for frame in frames] == [frame["data"]["offset"] for frame in frames] == [2, 3]

    browser.run("say({ack: 2})")
    wait_for(
        lambda: server.stored_subscription(sub_id)["acked_offset"] == 2,
        lambda: f"the ack: {server.stored_subscription(sub_id)}",
    )

    server.stop()
    browser.until("closes.length >= 1")
    assert browser.value("closes[0]") == {
        "code": SERVICE_RESTART,
        "reason": "stopping: the server is stopping",
        "clean": True,
    }
    server.insert_meanwhile(3)
    server.start()
    browser.until("opened.length === 2 && changes().length >= 3")

    before = browser.value("closes.length")
    server.kill()
    browser.until(f"closes.length > {before}")
    assert browser.value(f"closes[{before}].code") == ABNORMAL
    server.insert_meanwhile(4, 5)
    server.start()
    server.insert(6)
    browser.until("changes().length >= 6")
    assert browser.ids() == numbers(7)
    # The last acknowledged offset is 2: the later changes were sent because of from_offset.
    assert server.stored_subscription(sub_id)["acked_offset"] == 2


def test_paused_web_socket_receives_no_changes_until_it_is_resumed(browser: Browser, serve: Serve) -> None:
    server = serve()
    sub_id = server.subscribe()
    browser.run("listen(arguments[0])", server.ws(sub_id))
    browser.until("opened.length === 1")
    browser.run("say({pause: true})")
    browser.until("controls('backpressure').length === 1")
    told = browser.value("controls('backpressure')[0].data")
    assert (told["state"], told["paused"], told["sub_id"]) == ("paused", True, sub_id)
    assert server.stored_subscription(sub_id)["paused"]

    server.insert(1, 2)
    wait_for(
        lambda: server.stored_subscription(sub_id)["lag"] == 2,
        lambda: f"two changes in the log: {server.stored_subscription(sub_id)}",
    )
    assert browser.ids() == []
    browser.run("say({pause: false})")
    browser.until("changes().length >= 2")
    assert browser.ids() == numbers(3)


def test_invalid_frame_closes_the_web_socket_with_its_reason(browser: Browser, serve: Serve) -> None:
    server = serve()
    browser.run("again = false; listen(arguments[0])", server.ws(server.subscribe()))
    browser.until("opened.length === 1")
    browser.run("socket.send('hello')")
    browser.until("closes.length === 1")
    close = browser.value("closes[0]")
    assert close["code"] == POLICY and close["reason"].startswith("bad_frame: ") and close["clean"]


def test_web_socket_without_a_ticket_is_refused_by_a_server_with_a_credential(browser: Browser, serve: Serve) -> None:
    server = serve(token="s3cret")
    sub_id = server.subscribe()
    browser.run("again = false; listen(arguments[0])", server.ws(sub_id))
    browser.until("closes.length === 1")
    assert browser.value("closes[0].code") == ABNORMAL and browser.value("opened") == []

    browser.run(
        """const [base, token, url] = arguments;
        return ask(base, token, "security.ticket.create").then(found => listen(`${url}?ticket=${found.ticket}`))""",
        server.url,
        server.token,
        server.ws(sub_id),
    )
    server.insert(1)
    browser.until("changes().length >= 1")
    assert browser.ids() == [2]
