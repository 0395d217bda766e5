"""A browser for the whole run, and for each test a fresh page and the servers it asks for."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Browser, programs
from tests.browser.page_server import PageServer
from tests.browser.restartable_server import TABLE, KeptServer

MISSING = (
    "NO BROWSER, so nothing of tests/browser was tried: install Chromium and its driver "
    "(Debian, Ubuntu: apt-get install chromium chromium-driver)"
)


@pytest.fixture(scope="session")
def one_browser() -> Iterator[Browser]:
    """Started once: that takes longest."""
    found = programs()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    browser = Browser(*found)
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def pages() -> Iterator[PageServer]:
    """The web site, of another origin than the server."""
    site = PageServer()
    yield site
    site.close()


@pytest.fixture
def browser(one_browser: Browser, pages: PageServer) -> Iterator[Browser]:
    """The browser, on a fresh page of this machine."""
    one_browser.visit(pages.url())
    yield one_browser
    one_browser.visit("about:blank")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., KeptServer]]:
    """A started server with an empty table: `serve(settings, token=…)`."""
    made: list[KeptServer] = []

    def start(settings: str = "", token: str = "") -> KeptServer:
        server = KeptServer(tmp_path / "data", settings, token)
        made.append(server)
        server.start()
        server.ask("sql.exec", sql=TABLE)
        return server

    yield start
    for server in made:
        server.close()
