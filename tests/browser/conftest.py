"""A browser for the whole run, and for each test a new page and the servers it requests."""

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
    """Start the browser once for the run, because that takes longest."""
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
    """Yield the web site, of another origin than the server."""
    site = PageServer()
    yield site
    site.close()


@pytest.fixture
def browser(one_browser: Browser, pages: PageServer) -> Iterator[Browser]:
    """Yield the browser on a new page of this machine."""
    one_browser.visit(pages.url())
    yield one_browser
    one_browser.visit("about:blank")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., KeptServer]]:
    """Return `serve(settings, token=…)`, which starts a server with an empty table."""
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
