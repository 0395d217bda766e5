"""The drivers by which a pipeline connects to databases, of SQL sinks and of the meta store, and their errors."""

from __future__ import annotations

import sqlalchemy as sa

_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "mariadb+pymysql": "mysql+pymysql",
}


def with_driver(url: sa.URL) -> sa.URL:
    """Return `url` with our driver; the URL of another database is returned unchanged."""
    return url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))


def message_of(error: sa.exc.SQLAlchemyError) -> str:
    """Return the first line of the database's message, without the statement."""
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__
