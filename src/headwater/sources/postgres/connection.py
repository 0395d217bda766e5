"""Connections to PostgreSQL, and the translation of psycopg's errors, which must not leave this package.

A URL may contain a password. Only libpq receives it: no message and no log line repeats it.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import conninfo, pq
from psycopg.pq.abc import PGconn

from headwater.errors import ConfigError, HeadwaterError, InvalidRequest, SourceError, SourceUnfit
from headwater.sources.postgres.errors import DENIED, fault
from headwater.sources.postgres.types import SETTINGS

CONNECT_SECONDS = 10
WRITING = {"default_transaction_read_only": "off"}  # barriers and publications write; readers set READ ONLY themselves
# Set by a statement after connecting: PGTZ and similar variables override the options in the connection string.
_SET = "; ".join(f"SET {name} = '{value}'" for name, value in SETTINGS.items()).encode()

Connection = psycopg.Connection[tuple[Any, ...]]


class Server:
    """The address and login of a database. `name` is its name in messages."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        try:
            given = conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            given = {"host": "@"}
        if "@" in str(given.get("host", "")):  # a part of an unescaped password
            raise ConfigError(  # the parser's message would repeat parts of the URL
                f"the address of {name!r} is invalid",
                hint="Write postgresql://USER@HOST:PORT/DATABASE, with % escapes where a part has special characters.",
            )
        given.setdefault("application_name", "headwater")
        given.setdefault("connect_timeout", CONNECT_SECONDS)
        given.setdefault("keepalives_idle", 30)
        hosts = [given.get("host") or os.environ.get("PGHOST"), given.get("hostaddr") or os.environ.get("PGHOSTADDR")]
        if any("," in str(host) for host in hosts) and "PGTARGETSESSIONATTRS" not in os.environ:
            given.setdefault("target_session_attrs", "primary")  # otherwise a session is on any server that answers
        self._given = given

    def as_login(self, user: str, password: str | None) -> Server:
        """Return the same address with another login; without a password libpq reads a file such as ~/.pgpass."""
        found = Server(self.name, self.address)
        found._given = {name: value for name, value in self._given.items() if name not in ("user", "password")}
        found._given["user"] = user
        if password is not None:
            found._given["password"] = password
        return found

    @property
    def address(self) -> str:
        """Return the connection string for libpq, which may contain a password."""
        return conninfo.make_conninfo("", **self._given)

    def connect(self, **settings: str) -> Connection:
        """Open a session in autocommit mode; SourceError if that fails. `settings` are PostgreSQL's."""
        with self.errors("cannot connect"):
            found: Connection = psycopg.connect(self._text(settings), autocommit=True)
        try:
            with self.errors("cannot connect"):
                found.execute(_SET)
            self._check(found)
        except BaseException:
            found.close()
            raise
        return found

    def replicate(self) -> PGconn:
        """Open a replication connection on libpq directly: psycopg's Connection cannot copy in both directions."""
        found = pq.PGconn.connect_start(self._text({}, replication="database").encode())
        try:
            self._establish(found)
            if found.exec_(_SET).status != pq.ExecStatus.COMMAND_OK:
                raise self._refused(found.get_error_message())
        except BaseException:
            found.finish()
            raise
        return found

    def _establish(self, made: PGconn) -> None:
        """Connect step by step: `PGconn.connect` would hold the interpreter lock, and so block the process, until an
        unreachable server answers."""
        seconds = int(self._given.get("connect_timeout") or 0)
        end, asks = time.monotonic() + (seconds or math.inf), select.POLLOUT
        while made.status != pq.ConnStatus.BAD:
            ready = select.poll()
            ready.register(made.socket, asks)  # the socket changes with each address that is tried
            if not ready.poll(min(max(end - time.monotonic(), 0), 3600) * 1000) and time.monotonic() >= end:
                raise self._refused(f"no answer within {seconds} seconds")
            state = made.connect_poll()
            if state == pq.PollingStatus.OK:
                return
            asks = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
        raise self._refused(made.get_error_message())

    def _text(self, settings: dict[str, str], **more: str) -> str:
        """Return the connection string. Our settings override the URL's; variables such as PGTZ override both."""
        ours = [f"-c {name}={_escaped(value)}" for name, value in {**SETTINGS, **WRITING, **settings}.items()]
        options = " ".join([*filter(None, [str(self._given.get("options") or "")]), *ours])
        return conninfo.make_conninfo("", **{**self._given, **more, "client_encoding": "UTF8", "options": options})

    def _check(self, connection: Connection) -> None:
        if connection.info.parameter_status("server_encoding") == "SQL_ASCII":  # the server converts other encodings
            raise SourceUnfit(
                f"{self.name!r} has no defined text encoding (SQL_ASCII)",
                hint="Create a database with ENCODING 'UTF8', and load a dump into it.",
            )

    def _refused(self, message: str) -> HeadwaterError:
        """Return the error for a failed connection attempt, which has a message and no SQLSTATE."""
        text = f"cannot connect to {self.name!r}: {' '.join(message.split())}"
        if "must be superuser or replication role" in text or "permission denied to start WAL sender" in text:
            return SourceUnfit(text, hint=f"Run: ALTER ROLE {self.user} REPLICATION;")
        if "no pg_hba.conf entry" in text:
            hint = "Allow it in pg_hba.conf, replication connections included, then: SELECT pg_reload_conf();"
            return SourceUnfit(text, hint=hint)
        return SourceError(text, hint="Check the address, the credentials, and that the server runs.")

    @property
    def user(self) -> str:
        """Return the quoted role, for SQL in hints."""
        return quoted(str(self._given.get("user") or "YOUR_ROLE"))

    @contextmanager
    def errors(self, what: str = "") -> Iterator[None]:
        """Translate psycopg's errors inside the block into ours; `what` is the start of their text."""
        try:
            yield
        except psycopg.Error as error:
            raise self._to_error(error, what) from error

    def _to_error(self, error: psycopg.Error, what: str) -> HeadwaterError:
        if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
            return self._refused(str(error))
        return to_error(error, what or self.name)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def quoted(name: str) -> str:
    """Return a name quoted for SQL; no name enters SQL text unquoted."""
    if "\0" in name:
        raise InvalidRequest("a name cannot hold a NUL character")
    return '"' + name.replace('"', '""') + '"'


def text_literal(text: str) -> str:
    """Return a text as an SQL literal, for statements that are sent or printed without parameters."""
    return "'" + text.replace("'", "''") + "'"


def to_error(error: psycopg.Error, what: str = "") -> HeadwaterError:
    """Return our error for an error of psycopg."""
    return error_of(error.sqlstate or "", error.diag.message_primary or str(error), what)


def error_of(state: str, message: str, what: str = "") -> HeadwaterError:
    """Return our error for a failure of one of our own statements, not of a caller's."""
    text = f"{what}: {' '.join(message.split())}" if what else " ".join(message.split())
    if state == DENIED:
        return SourceUnfit(text, hint="Grant the right to the role that Headwater connects as.")
    return fault(state, text)
