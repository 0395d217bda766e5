"""The tables and the engine of the meta store: SQLite, PostgreSQL, MySQL or MariaDB, through SQLAlchemy Core.

The columns are those that every pipeline server of this kind has (subscribe, progress) and some of our own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, SQLAlchemyError

from headwater.errors import ConfigError, PipelineError, Unavailable
from headwater.model.url_secrets import without_secrets
from headwater.pipeline.database_drivers import message_of, with_driver

VERSION = 1  # of the table layout
ATTEMPTS, ATTEMPT_SECONDS = 20, 0.1  # for creating the tables, when several servers start concurrently
BUSY_SECONDS = 30  # a SQLite file has one writer at a time
# Now, in milliseconds by the database's clock. UTC on MySQL: its local time repeats one hour per year.
NOW = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)",
    "mysql": "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)",
}

# Names fit into a key of any MySQL: 1,272 of its 3,072 bytes.
DB_CHARS, TABLE_CHARS, NAME_CHARS = 64, 190, 64
_LONG = sa.Text().with_variant(LONGTEXT(), "mysql")
_MYSQL: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin"}
_METADATA = sa.MetaData()


def _number(name: str, default: int | None = 0) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=default is None, default=default)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, _LONG, nullable=False, default="")


def _key(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


META = sa.Table("headwater_meta", _METADATA, _key("id", sa.BigInteger), _number("version"), **_MYSQL)

SUBSCRIBE = sa.Table(
    "headwater_subscribe",
    _METADATA,
    _key("cluster_id", sa.BigInteger),
    _key("db_name", sa.String(DB_CHARS)),
    _key("table_name", sa.String(TABLE_CHARS)),
    _key("subscribe_name", sa.String(NAME_CHARS)),
    _number("db_id"),
    _number("table_id"),
    _words("master_addrs"),
    _words("sink"),
    _number("cancel"),
    _words("owner"),
    # Columns of our own.
    _number("owner_until_ms"),
    _number("fence"),
    _words("state"),
    _words("error"),
    _number("resnapshot"),
    _number("verified_through", None),
    _number("updated_ms"),
    **_MYSQL,
)

PROGRESS = sa.Table(
    "headwater_progress",
    _METADATA,
    _key("db_name", sa.String(DB_CHARS)),
    _key("table_name", sa.String(TABLE_CHARS)),
    _key("subscribe_name", sa.String(NAME_CHARS)),
    _key("range_id", sa.BigInteger),
    _number("progress_stage"),  # index in STAGES
    _number("progress_init_snapshot_version"),
    _number("progress_current_snapshot_version"),
    _words("progress_last_snapshot_key"),
    _number("progress_last_log_index"),
    # Columns of our own.
    _number("range_epoch"),
    _words("start_key"),
    sa.Column("end_key", _LONG, nullable=True),
    _words("reason"),
    _number("rows"),
    _number("rows_estimate"),
    **_MYSQL,
)


class MetaDatabase:
    """An engine that raises Headwater errors. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self.name = without_secrets(self._engine.url.render_as_string(hide_password=True))
        self.now = sa.literal_column(NOW[self._engine.dialect.name], sa.BigInteger)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Run one transaction; its first statement should write, so that no other transaction commits in between."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise _ours(error, self.name) from None

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def prepare(self) -> None:
        """Create the tables if they do not exist; raise PipelineError for tables of another version."""
        found = self._version()
        for left in reversed(range(ATTEMPTS)):
            if found is not None:
                break
            try:
                self._create()
            except PipelineError:  # another pipeline server may be creating the tables
                if not left:
                    raise
                time.sleep(ATTEMPT_SECONDS)
            found = self._version()
        if found != VERSION:
            raise PipelineError(
                f"the meta store {self.name} has tables of version {found}, this Headwater knows {VERSION}",
                hint="Upgrade Headwater, or name another meta store.",
            )

    def _version(self) -> int | None:
        """Return the version of the tables; None if they do not exist or are incomplete."""
        try:
            with self._engine.connect() as connection:
                if not sa.inspect(connection).has_table(META.name):
                    return None
                return connection.execute(sa.select(META.c.version)).scalar()
        except SQLAlchemyError as error:
            raise _ours(error, self.name) from None

    def _create(self) -> None:
        try:
            with self._engine.begin() as connection:
                _METADATA.create_all(connection)
                connection.execute(sa.insert(META).values(id=1, version=VERSION))
        except DatabaseError as error:
            raise PipelineError(
                f"cannot create the tables of the meta store {self.name}: {message_of(error)}"
            ) from None


def _engine(url: str) -> sa.Engine:
    try:
        parsed = with_driver(sa.make_url(url) if "://" in url else sa.URL.create("sqlite", database=url))
        if parsed.get_backend_name() not in NOW:
            raise ConfigError(f"{parsed.get_backend_name()!r} is not supported as a meta store", hint=_KINDS)
        return sa.create_engine(parsed, **_OPTIONS[parsed.get_backend_name()])
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise ConfigError("meta: this is not the URL of a database", hint=_KINDS) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the meta store needs the package {error.name}", hint="pip install headwater[spark]"
        ) from None


_OPTIONS: dict[str, dict[str, Any]] = {
    "sqlite": {"connect_args": {"timeout": BUSY_SECONDS}},
    "postgresql": {"pool_pre_ping": True},
    # Under MySQL's default isolation, two servers that replace rows of different tasks take gap locks and deadlock.
    "mysql": {"pool_pre_ping": True, "isolation_level": "READ COMMITTED"},
}
_KINDS = "A file is SQLite; others are postgresql://…, mysql://… and mariadb://…"


def _ours(error: SQLAlchemyError, name: str) -> Unavailable:
    return Unavailable(
        f"the meta store {name} is not available: {message_of(error)}", hint="Nothing was written there. Try again."
    )
