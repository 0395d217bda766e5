"""Taking Headwater out of a PostgreSQL database: its slot and its publication go, the server keeps no log for us."""

from __future__ import annotations

from headwater.config import PostgresConfig
from headwater.sources.postgres.connection import Server
from headwater.sources.postgres.slot import Dropped, drop, slot_name


def detach(name: str, url: str, *, config: PostgresConfig) -> Dropped:
    """Remove every trace that the role may; what became of them. No server may be attached."""
    server = Server(name, url)
    with server.connect() as connection, server.errors():
        return drop(connection, slot_name(config.publication, name), slot_name(config.slot, name))
