"""Fixtures and plugins for all rooms."""

import functools
import gc
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx._transports import default as transports
from hypothesis import settings
from tests.sources.sqlite_source import Rig
from tests.sources.sqlite_writer_process import Foreign
from tests.suite.deadlines import lengthen_limits
from tests.suite.examples import PROFILE

pytest_plugins = ("tests.suite.seeds", "tests.suite.slices", "tests.suite.timings")

# Keep bytecode, also in the processes that tests start: compiling all modules again takes most of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Run in the background of a shell: what we start would not hear Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def once(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """Return `create` with a cache: loading the system's authorities for every httpx client takes longer than most
    tests.
    """
    made = functools.cache(lambda trusted, *args, **more: create(*args, **more))
    return lambda *args, **more: made(os.environ.get("SSL_CERT_FILE"), *args, **more)


setattr(transports, "create_ssl_context", once(transports.create_ssl_context))  # noqa: B010

settings.load_profile(PROFILE)
lengthen_limits()

# A worker has half a million objects after collection, which live to its end: no garbage collection goes through them.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from now on, but only among later objects."""
    gc.enable()
    gc.freeze()


# Rooms and files that start whole servers, processes and browsers: left out of `make check`.
WHOLE = {"browser", "caches", "cli", "conformance", "guarantees", "soundness"}
SERVERS = {"test_grpc_changefeed.py", "test_grpc_subscribe.py", "test_plugins.py", "test_random_requests.py"}
SERVERS |= {"test_pg_doctor.py", "test_pg_page.py", "test_pg_serve.py", "test_pg_visible_commits.py"}
SERVERS |= {
    "test_answer_limits.py",
    "test_large_answers.py",
    "test_http_protocol.py",
    "test_pull_methods.py",
    "test_tls.py",
}
SERVERS |= {"test_faulty_server.py", "test_live_feeds.py", "test_live_pulls.py", "test_pg_logins.py", "test_app.py"}
SERVERS |= {"test_ddl_scopes.py", "test_grpc_connections.py", "test_grpc_server.py", "test_http_floods.py"}
SERVERS |= {"test_pipelined_requests.py", "test_stalled_streams.py", "test_unread_pulls.py"}
SERVERS |= {"test_grpc_pull.py", "test_grpc_watch.py", "test_conflicts.py", "test_data_api.py", "test_pull_snapshot.py"}
POSTGRES = {"db", "pg", "server", "shared", "tls"}  # fixtures of tests/sources/postgres that start one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow by the folder, file or fixture; other slow tests are marked one by one."""
    for item in items:
        parts = item.path.relative_to(item.config.rootpath).parts
        on_postgres = "postgres" in parts and POSTGRES.intersection(getattr(item, "fixturenames", ()))
        if WHOLE.intersection(parts) or item.path.name in SERVERS or on_postgres:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def foreign_process() -> Iterator[Foreign]:
    """Yield a second process, one for the whole run."""
    process = Foreign()
    yield process
    process.stop()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Return the path of the user's file."""
    return tmp_path / "app.db"


@pytest.fixture
def foreign(foreign_process: Foreign, database: Path) -> Iterator[Foreign]:
    """Yield a connection of another process to the user's file, which it creates in WAL mode."""
    foreign_process.open(database)
    foreign_process.run("PRAGMA journal_mode = WAL")
    yield foreign_process
    foreign_process.close()


@pytest.fixture
def rig(foreign: Foreign, database: Path) -> Iterator[Callable[..., Rig]]:
    """Return `rig("CREATE TABLE …", …, tables=(…))`, which runs the statements, then attaches a source to the file."""
    made: list[Rig] = []

    def attach(*statements: str, **config: Any) -> Rig:
        foreign.script(*statements)
        made.append(Rig(database, foreign, **config).attach())
        return made[-1]

    yield attach
    for one in made:
        one.close()
