"""Removal of Headwater from a PostgreSQL database: slot and publication are dropped, the server keeps no WAL for us."""

from __future__ import annotations

import msgspec
import psycopg

from headwater.sources.postgres.capture.slot.slot import DropResult, drop, slot_name
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.schema import ddl_trigger
from headwater.sources.postgres.settings import PostgresConfig


def detach(name: str, url: str, *, config: PostgresConfig) -> DropResult:
    """Drop all that the role may drop; SourceError if a server still reads the slot: see `drop_slot`."""
    server = Server(name, url)
    with server.connect() as connection, server.errors():
        dropped = drop(connection, slot_name(config.publication, name), slot_name(config.slot, name))
        return msgspec.structs.replace(dropped, left_trigger=_drop_trigger(connection))


def _drop_trigger(connection: Connection) -> str:
    """Drop the trigger that records DDL statements; return the SQL for it if the role may not, else ""."""
    if connection.execute(ddl_trigger.IS_INSTALLED).fetchone() is None:
        return ""
    try:
        with connection.transaction():
            connection.execute(ddl_trigger.REMOVE.encode())
    except psycopg.errors.InsufficientPrivilege:
        return ddl_trigger.REMOVE
    return ""
