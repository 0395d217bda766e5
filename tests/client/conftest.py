"""Fixtures of the client: a faulty server, a live one, and both clients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.both_clients import ask_async, ask_sync
from tests.client.faulty_server import Faulty
from tests.conformance.live_server import Live


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Any:
    """Return `ask(url, lambda client: …)`; each test runs with the sync and the async client."""
    return request.param


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    """Yield a server that answers what the test sets."""
    with Faulty() as server:
        yield server


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """Yield a whole Headwater."""
    server = Live(tmp_path)
    yield server
    server.stop()
