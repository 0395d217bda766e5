"""The JavaScript client follows a table in a browser across a restart of the server, without gap or repeat."""

from collections.abc import Callable, Iterator

import pytest
from tests.browser.chromium import Browser, wait_for
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


@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_js_tail_continues_across_a_server_restart(page: Browser, serve: Serve, ends: str) -> None:
    server = serve()
    page.run("follow(arguments[0], {format: 'plain_json'})", server.url)
    page.until("opened.length === 1")
    server.insert(1, 2)
    page.until("seen.length >= 2")
    getattr(server, ends)()
    server.insert_meanwhile(3)
    server.start()
    server.insert(4)
    page.until("seen.length >= 4")
    assert page.value("seen.map(change => change.after.id)") == [1, 2, 3, 4]


def test_js_tail_from_snapshot_delivers_rows_before_changes(page: Browser, serve: Serve) -> None:
    server = serve()
    server.insert(1, 2)
    page.run("follow(arguments[0], {format: 'plain_json', start: 'snapshot'})", server.url)
    page.until("closes.includes('snapshot_end')")
    server.insert(3)
    page.until("seen.length >= 3")
    assert page.value("seen.map(change => change.after.id)") == [1, 2, 3]


def test_closed_js_tail_leaves_no_open_stream(page: Browser, serve: Serve) -> None:
    server = serve()
    page.run("follow(arguments[0], {})", server.url)
    page.until("opened.length === 1")
    page.run("stream.close()")
    wait_for(lambda: server.streams() == 0, lambda: f"no stream; there are {server.streams()}")
