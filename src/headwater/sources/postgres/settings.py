"""Settings of the PostgreSQL source: the section [postgres]."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.config.setting_types import FLAG, NAMES, SECONDS, TEXT, one_of, or_none, setting


@dataclass(frozen=True)
class PostgresConfig:
    """Settings of the PostgreSQL source."""

    slot: str = setting("headwater_{name}", TEXT, "name of the replication slot; {name} is that of the database")
    publication: str = setting("headwater_{name}", TEXT, "name of the publication; {name} is that of the database")
    tables: tuple[str, ...] = setting(
        (), NAMES, "tables to capture; none named means all that have a key or another replica identity"
    )
    publish_all: bool = setting(
        False, FLAG, "publish FOR ALL TABLES; PostgreSQL then refuses updates and deletes of tables without a key"
    )
    heartbeat_seconds: float = setting(
        10.0, SECONDS, "how often the server is told that it need not keep its log, while nothing is captured"
    )
    tx_seconds: float = setting(2.0, SECONDS, "longest an interactive transaction may hold its locks")
    tx_idle_seconds: float = setting(0.5, SECONDS, "longest it may hold them without a statement")
    statement_seconds: float = setting(30.0, SECONDS, "longest one statement of a caller may run")
    reader: str | None = setting(
        None, or_none(TEXT), "PostgreSQL login for callers' queries and filters, with SELECT only"
    )
    writer: str | None = setting(None, or_none(TEXT), "PostgreSQL login for editors' statements, with DML only")
    reader_password_file: str | None = setting(
        None, or_none(TEXT), "file with the reader's password, mode 0600; default: ~/.pgpass"
    )
    writer_password_file: str | None = setting(
        None, or_none(TEXT), "file with the writer's password, mode 0600; default: ~/.pgpass"
    )
    on_discontinuity: str = setting(
        "new_generation",
        one_of("new_generation", "stop"),
        "what to do about a lost slot, a failover, a restored server",
    )
