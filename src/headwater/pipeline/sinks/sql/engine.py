"""Connections to the database of a SQL sink: the URL stays secret, and database errors become Headwater errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from headwater.errors import ConfigError, PipelineError, SinkUnfit, Unavailable
from headwater.pipeline.database_drivers import message_of, with_driver
from headwater.pipeline.sinks.sql.dialects import MYSQL, POSTGRES, SQLITE

LOCK_SECONDS = 60  # longest wait for another run that holds the sink's lock
URL_VARIABLE = "HEADWATER_SINK_URL"

# Strict mode rejects values instead of truncating them. NO_BACKSLASH_ESCAPES is off: the driver cannot detect it.
_SETUP = {
    # In another time zone the driver could not read the first or the last day that it knows.
    POSTGRES: "SET lock_timeout = '{0}s'; SET TIME ZONE 'UTC'",
    MYSQL: "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
    "innodb_lock_wait_timeout = {0}, lock_wait_timeout = {0}",
    SQLITE: "PRAGMA busy_timeout = {0}000",
}
_READS = "headwater_reads"


def read_url(settings: Mapping[str, str]) -> str:
    """Return the URL: `url` itself, the content of `url_file`, or the environment variable `url_env`."""
    if settings.get("url"):
        return settings["url"]
    if settings.get("url_file"):
        try:
            return Path(settings["url_file"]).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"url_file cannot be read: {error.strerror}", hint="The file must hold one line, the URL."
            ) from None
    variable = settings.get("url_env", URL_VARIABLE)
    if os.environ.get(variable):
        return os.environ[variable]
    raise ConfigError("the sql sink needs a URL", hint=f"Set url, url_file, or {variable} in the environment.")


def parse_url(url: str) -> sa.URL:
    """Return the URL with our driver, and with the absolute path of a SQLite file, since executors run elsewhere."""
    try:
        parsed = with_driver(sa.make_url(url))
    except (exc.ArgumentError, ValueError):
        raise ConfigError("url: this is not the URL of a database", hint=_KINDS) from None
    backend = parsed.get_backend_name()
    if backend not in (POSTGRES, MYSQL, SQLITE):
        raise ConfigError(f"a sql sink cannot write to {backend!r}", hint=_KINDS)
    if backend == SQLITE:
        if parsed.database in (None, "", ":memory:"):
            raise ConfigError("a sql sink cannot write to a database in memory", hint="Name a file: sqlite:///lake.db")
        return parsed.set(database=str(Path(str(parsed.database)).absolute()))
    if backend == MYSQL and "charset" not in parsed.query:
        return parsed.update_query_dict({"charset": "utf8mb4"})
    return parsed


_KINDS = "There are postgresql://…, mysql://…, mariadb://… and sqlite:///file"


def shown(url: sa.URL, table: str) -> str:
    """Return backend, host, database and table for output, without secrets."""
    place = f"{url.host or ''}{f':{url.port}' if url.port else ''}"
    return f"{url.get_backend_name()} {place}/{(url.database or '').lstrip('/')} {table}"


def open_engine(url: str, lock_seconds: int = LOCK_SECONDS) -> sa.Engine:
    """Return an engine with READ COMMITTED transactions; on SQLite, a transaction takes the write lock as it begins."""
    parsed = parse_url(url)
    backend = parsed.get_backend_name()
    settings: dict[str, Any] = {"hide_parameters": True}
    if backend != SQLITE:
        settings |= {"isolation_level": "READ COMMITTED", "pool_pre_ping": True}
    try:
        engine = sa.create_engine(parsed, **settings)
    except (ModuleNotFoundError, exc.NoSuchModuleError) as error:
        raise ConfigError(f"the sql sink lacks its driver: {error}", hint="pip install 'headwater[spark]'") from None
    event.listen(engine, "connect", partial(_set_up, backend, _SETUP[backend].format(lock_seconds)))
    if backend == SQLITE:
        event.listen(engine, "begin", _begin)
    return engine


def _set_up(backend: str, statement: str, connection: Any, record: object) -> None:
    if backend == SQLITE:
        connection.isolation_level = None  # otherwise the driver begins transactions on its own
    cursor = connection.cursor()
    cursor.execute(statement)
    cursor.close()
    connection.commit()


def _begin(connection: sa.Connection) -> None:
    reads = connection.get_execution_options().get(_READS)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Run one transaction; commit unless the block raises."""
    with ours(), engine.begin() as connection:
        yield connection


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a connection for reading, which blocks no writer."""
    with ours(), engine.connect().execution_options(**{_READS: True}) as connection:
        yield connection


@contextmanager
def ours() -> Iterator[None]:
    """Turn database errors into Unavailable if a retry may succeed, otherwise into SinkUnfit or PipelineError."""
    try:
        yield
    except exc.DBAPIError as error:
        if _may_pass(error):
            raise Unavailable(f"the sink's database is not available: {message_of(error)}", hint=_LATER) from None
        raise SinkUnfit(f"the sink's database rejected the write: {message_of(error)}") from None
    except exc.SQLAlchemyError as error:
        raise PipelineError(f"the sink's database: {message_of(error)}") from None


_LATER = "Nothing of this transaction was kept. It is tried again."


# Errors of the MySQL server: too many connections, shutdown, lock wait, deadlock. Client errors start at 2000.
_PASSING = {1040, 1053, 1080, 1180, 1203, 1205, 1213, 1317, 1927}


def _may_pass(error: exc.DBAPIError) -> bool:
    if not isinstance(error, (exc.OperationalError, exc.InterfaceError, exc.InternalError)):
        return error.connection_invalidated
    number = error.orig.args[0] if error.orig is not None and error.orig.args else None
    return not isinstance(number, int) or number in _PASSING or 2000 <= number < 3000 or number == 0
