"""One server that most tests share, each with tables of its own, and servers with settings for those that need them."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

_numbers = count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of the contract on PostgreSQL to `make soak`: it takes as long as the one on SQLite."""
    for item in items:
        every_time = getattr(getattr(item, "module", None), "EVERY_TIME", None)
        if item.path.name == "test_over_postgres.py" and every_time and not item.name.startswith(every_time):
            item.add_marker(pytest.mark.soak(seconds=1))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Yield a server with the default settings of Live."""
    live = Live(tmp_path_factory.mktemp("shared"))
    yield live
    live.stop()


@pytest.fixture
def server(shared: Live) -> Iterator[Live]:
    """Yield the shared server; after the test close its streams and drop its tables.

    Every change of the schema makes every connection read the whole schema again: with hundreds of tables left behind
    by other tests, creating one took a second.
    """
    before = shared.tables()
    yield shared
    shared.leave()
    shared.drop_tables(before)


@pytest.fixture
def table(server: Live) -> str:
    """Create a table in the shared server: id INTEGER PRIMARY KEY, status TEXT, total REAL."""
    name = f"t{next(_numbers)}"
    server.sql(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    assert server.app.database("main").catch_up(PATIENCE)  # so that no reader is told of its creation
    return name


@pytest.fixture
def make_live() -> Callable[..., Live]:
    """Return what starts a server on a folder: other modules override it to run the same tests on other servers."""
    return Live


@pytest.fixture
def start(tmp_path: Path, make_live: Callable[..., Live]) -> Iterator[Callable[..., Live]]:
    """Return a function that starts a server of the test's own: `start(log={"retention_events": 2})`."""
    made: list[Live] = []

    def begin(**settings: Any) -> Live:
        made.append(make_live(tmp_path / f"data{len(made)}", **settings))
        return made[-1]

    yield begin
    for live in made:
        live.remove()


@pytest.fixture(params=["sse", "ws"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return the transport of streams; each test runs with both."""
    return request.param
