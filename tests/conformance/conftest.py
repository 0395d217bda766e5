"""One server that most tests share, each with tables of its own, and servers with settings for those that need them."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.live import Live

_numbers = count(1)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With every setting at its default."""
    live = Live(tmp_path_factory.mktemp("shared"))
    yield live
    live.stop()


@pytest.fixture
def server(shared: Live) -> Iterator[Live]:
    """The shared one; streams that the test opened are closed after it."""
    yield shared
    shared.leave()


@pytest.fixture
def table(server: Live) -> str:
    """A fresh table of the shared server: id INTEGER PRIMARY KEY, status TEXT, total REAL."""
    name = f"t{next(_numbers)}"
    server.sql(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    return name


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    """A server of one's own: `start(log={"retention_events": 2})`."""
    made: list[Live] = []

    def begin(**settings: Any) -> Live:
        made.append(Live(tmp_path / f"data{len(made)}", **settings))
        return made[-1]

    yield begin
    for live in made:
        live.stop()


@pytest.fixture(params=["sse", "ws"])
def transport(request: pytest.FixtureRequest) -> str:
    """Both kinds of streams."""
    return request.param
