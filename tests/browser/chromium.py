"""A real browser: Debian's headless Chromium, driven by its chromedriver."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait
from tests.suite.deadlines import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
EVIL_HOST = "evil.test"  # another site's name for this machine, as after DNS rebinding
POLL_SECONDS = 0.02

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root, as in a container, has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--disable-features=BackForwardCache",  # it keeps a page that was left, and its streams, for a while
    f"--host-resolver-rules=MAP {EVIL_HOST} 127.0.0.1",
)


def programs() -> tuple[str, str] | None:
    """Return the browser and its driver; None unless both are installed."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One tab. Its page collects received frames in `seen`, which tests read."""

    def __init__(self, browser: str, driver: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in FLAGS:
            options.add_argument(flag)
        self._driver = webdriver.Chrome(options=options, service=Service(executable_path=driver))

    def visit(self, url: str) -> None:
        """Load a page; this ends the scripts of the page before."""
        self._driver.get(url)

    def heed_policies(self, heeded: bool) -> None:
        """Set whether later pages are held to their Content-Security-Policy."""
        self._driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": not heeded})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the result of `script`, after awaiting a promise."""
        return self._driver.execute_script(script, *arguments)

    def value(self, expression: str) -> Any:
        """Return the current value of a JavaScript expression."""
        return self.run(f"return {expression}")

    def until(self, condition: str) -> None:
        """Wait for `condition`, a JavaScript expression."""
        wait_for(lambda: self.value(condition), lambda: f"{condition}; the page holds {self._state()}")

    def ids(self) -> list[Any]:
        """Return the ids of the changes that arrived."""
        return list(self.value("changes().map(frame => frame.id)"))

    def quit(self) -> None:
        self._driver.quit()

    def _state(self) -> Any:
        return self.value("({seen: seen.slice(-5), opened, errors, closes})")


def wait_for(done: Callable[[], Any], what: Callable[[], str]) -> None:
    """Wait until `done` returns a true value."""
    try:
        WebDriverWait(None, PATIENCE, POLL_SECONDS).until(lambda _: done())
    except Exception as error:
        error.add_note(f"waited for {what()}")
        raise
