"""For all rooms: property tests try the same examples on every run, and a slow machine does not fail them."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.sources.foreign import Foreign
from tests.sources.rig import Rig

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Run in the background of a shell: what we start would not hear Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("headwater", deadline=None, derandomize=True)
settings.load_profile("headwater")


# Whole servers, processes and browsers: left out of `make check`.
WHOLE = {"browser", "caches", "cli", "conformance", "guarantees", "soundness"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By the folder a test lies in."""
    for item in items:
        if WHOLE.intersection(item.path.parts):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def foreign_process() -> Iterator[Foreign]:
    """One second process for the whole run."""
    process = Foreign()
    yield process
    process.stop()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where the user's file lies."""
    return tmp_path / "app.db"


@pytest.fixture
def foreign(foreign_process: Foreign, database: Path) -> Iterator[Foreign]:
    """A connection of another process to the user's file, which it creates in WAL mode."""
    foreign_process.open(database)
    foreign_process.run("PRAGMA journal_mode = WAL")
    yield foreign_process
    foreign_process.close()


@pytest.fixture
def rig(foreign: Foreign, database: Path) -> Iterator[Callable[..., Rig]]:
    """Attach a source to the file: `rig("CREATE TABLE …", …, tables=(…))` runs the statements first."""
    made: list[Rig] = []

    def attach(*statements: str, **config: Any) -> Rig:
        foreign.script(*statements)
        made.append(Rig(database, foreign, **config).attach())
        return made[-1]

    yield attach
    for one in made:
        one.close()
