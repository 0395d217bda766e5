"""The databases of the demo: embedded SQLite, or its own PostgreSQL, which is removed at the end."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from headwater.cli.demo import writers
from headwater.cli.demo.server_process import clean_environment
from headwater.cli.failure import USAGE, Failure
from headwater.model.url_secrets import has_secrets

if TYPE_CHECKING:
    from headwater.cli.demo.embedded_postgres import Engine
    from headwater.cli.remote import Remote

URL = "HEADWATER_DEMO_URL"  # where the other program writes; never in its arguments


class DemoDatabases(Protocol):
    """The databases `main` and `web`, and a program that writes to them without the server."""

    title: str  # of the first step
    outside: str  # of the step in which the other program writes
    next: str  # what to try afterwards
    databases: Sequence[str]  # as `headwater serve` takes them
    settings: Mapping[str, str]  # of the server, as environment

    def order(self, first: int, commits: int) -> int:
        """Insert orders from the other program, which also rolls back a delete; return its process id."""

    def open_web(self, remote: Remote) -> None:
        """Create the second database, unless it is served from the start."""
        return

    def visit(self, rows: int) -> None:
        """Fill the table `visits` of `web`; with 0 rows, delete, update and rekey some of its rows."""

    def close(self) -> None:
        """Remove everything that is outside the demo's folder."""
        return


class SqliteDemo(DemoDatabases):
    """SQLite files in the data folder."""

    title = "A server on an embedded database"
    outside = "Another program writes straight into the file, with plain sqlite3"
    next = "headwater serve app=app.db --wal, headwater tail app, and docs/quickstart.md"
    databases: Sequence[str] = ()
    settings: Mapping[str, str] = {}

    def __init__(self, data: Path) -> None:
        self._data = data

    def order(self, first: int, commits: int) -> int:
        return _outside(writers.SQLITE_ORDERS, str(self._data / "main.db"), str(first), str(commits))

    def open_web(self, remote: Remote) -> None:
        remote.call("schema.create_database", db="web")

    def visit(self, rows: int) -> None:
        _outside(writers.SQLITE_VISITS, str(self._data / "web.db"), str(rows))


class PostgresDemo(DemoDatabases):
    """Two databases on a server: one that is started here, or the one at `url`."""

    outside = "Another program writes straight into PostgreSQL, with plain psycopg"
    next = "headwater serve shop=postgresql://…, headwater tail shop, and docs/postgres.md"

    def __init__(self, data: Path, url: str | None) -> None:
        self._engine: Engine | None = None
        if url is None:
            from headwater.cli.demo.embedded_postgres import Engine

            self._engine = Engine(data / "postgres")
            url = self._engine.url
        self._admin, self._own = url, f"headwater_demo_{secrets.token_hex(4)}"
        self._urls = {name: urlsplit(url)._replace(path=f"/{self._own}_{name}").geturl() for name in ("main", "web")}
        self._names = [f"{self._own}_{name}" for name in self._urls]
        self.databases: Sequence[str] = [f"{name}={each}" for name, each in self._urls.items()]
        pattern = self._own + "_{name}"
        self.settings: Mapping[str, str] = {
            "HEADWATER_POSTGRES_SLOT": pattern,
            "HEADWATER_POSTGRES_PUBLICATION": pattern,
        }
        try:
            version = _said(writers.POSTGRES_CREATE, self._admin, *self._names)
        except BaseException:
            self.close()
            raise
        self.title = f"A server on PostgreSQL {version}, by logical replication"

    def order(self, first: int, commits: int) -> int:
        return _outside(writers.POSTGRES_ORDERS, str(first), str(commits), url=self._urls["main"])

    def visit(self, rows: int) -> None:
        _outside(writers.POSTGRES_VISITS, str(rows), url=self._urls["web"])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        else:
            _said(writers.POSTGRES_DROP, self._admin, *self._names)


def demo_databases(source: str, url: str | None, data: Path) -> DemoDatabases:
    """Return the databases for --source and --url; Failure if --url is not allowed."""
    if source == "sqlite":
        if url is not None:
            raise Failure("--url is valid only with --source postgres", exit_code=USAGE)
        return SqliteDemo(data)
    if url is not None and has_secrets(url):
        hint = "Give it by PGPASSWORD or ~/.pgpass: others see arguments."
        raise Failure("the URL holds a password", hint=hint, exit_code=USAGE)
    return PostgresDemo(data, url)


def _outside(program: str, *args: str, url: str = "") -> int:
    return _run(program, *args, url=url)[0]


def _said(program: str, url: str, *args: str) -> str:
    return _run(program, *args, url=url)[1].strip()


def _run(program: str, *args: str, url: str) -> tuple[int, str]:
    """Run `program` in another process to its end; return its id and its output, Failure if it fails."""
    env = clean_environment() | {URL: url, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program, *args]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said, errors = process.communicate()
    if process.returncode:
        lines = errors.strip().splitlines()
        raise Failure(f"the other program failed: {lines[-1] if lines else process.returncode}")
    return process.pid, said
