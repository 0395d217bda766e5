"""Prepared queries: texts with an id of their own content, kept in a file. Preparing twice is preparing once."""

from __future__ import annotations

import base64
import hashlib
import threading
from pathlib import Path

import apsw
import msgspec

from headwater.errors import InvalidRequest, LimitExceeded, NotFound
from headwater.log.own_file import OwnFile
from headwater.model.principal import RANK

MAX_TEXT = 100_000  # characters
_SCHEMA = """
CREATE TABLE prepared (
  id TEXT PRIMARY KEY,
  db TEXT NOT NULL,
  sql TEXT NOT NULL,
  form BLOB,  -- the JSON it was sent as, where it was
  name TEXT,
  role TEXT NOT NULL DEFAULT ''  -- highest role that prepared the query
) STRICT, WITHOUT ROWID;
"""
FILE = OwnFile(
    "prepared queries",
    application_id=0x48575150,  # "HWQP"
    format=2,
    schema=_SCHEMA,
    aside="Move the file aside and start again: clients prepare their queries anew, and get the same ids.",
    upgrades={1: "ALTER TABLE prepared ADD COLUMN role TEXT NOT NULL DEFAULT ''"},
)


class Prepared(msgspec.Struct, frozen=True):
    """One query of one database."""

    id: str
    db: str
    sql: str
    form: bytes | None = None
    name: str | None = None
    role: str = ""  # highest role that prepared it; "" if it was not recorded


def query_id(db: str, sql: str) -> str:
    """The id of a query: the same for the same text on the same database, wherever and whenever."""
    digest = hashlib.sha256(f"{db}\0{sql}".encode()).digest()
    return f"q_{base64.b32encode(digest[:15]).decode().lower()}"


class PreparedQueries:
    """The file and what is in it. From any thread."""

    def __init__(self, path: Path, most: int, connection: apsw.Connection) -> None:
        self._path, self._most = path, most
        self._lock = threading.Lock()  # guards what follows
        self._file = connection
        found = connection.execute("SELECT id, db, sql, form, name, role FROM prepared")
        self._known: dict[str, Prepared] = {row[0]: Prepared(*row) for row in found}

    @classmethod
    def open(cls, path: Path, *, most: int, vfs: str | None = None) -> PreparedQueries:
        """The queries in the file at `path`."""
        with FILE.errors(path):
            return cls(path, most, FILE.connect(path, vfs=vfs))

    def add(self, db: str, sql: str, *, form: bytes | None = None, name: str | None = None, role: str = "") -> Prepared:
        """Store a query that a caller in `role` prepared; update the name and role of one that is stored already."""
        if len(sql) > MAX_TEXT:
            raise InvalidRequest(f"a query has at most {MAX_TEXT} characters", hint="Bind long values as arguments.")
        made = Prepared(query_id(db, sql), db, sql, form, name, role)
        with self._lock:
            if (known := self._known.get(made.id)) is not None:
                return self._renew(known, known.name if name is None else name, role)
            if len(self._known) >= self._most:
                raise LimitExceeded(
                    f"{self._most} queries are prepared, and no more are kept",
                    hint="Bind what differs as arguments, or raise queries.max_prepared.",
                )
            with FILE.errors(self._path):
                row = (made.id, made.db, made.sql, made.form, made.name, made.role)
                self._file.execute("INSERT INTO prepared VALUES (?, ?, ?, ?, ?, ?)", row)
            self._known[made.id] = made
            return made

    def _renew(self, known: Prepared, name: str | None, role: str) -> Prepared:
        """The lock is held."""
        role = max(role, known.role, key=lambda each: RANK.get(each, 0))
        if (name, role) == (known.name, known.role):
            return known
        with FILE.errors(self._path):
            self._file.execute("UPDATE prepared SET name = ?, role = ? WHERE id = ?", (name, role, known.id))
        renewed = self._known[known.id] = msgspec.structs.replace(known, name=name, role=role)
        return renewed

    def get(self, id: str) -> Prepared:
        """The query with this id; NotFound."""
        found = self._known.get(id)
        if found is None:
            raise NotFound("unknown query_id", hint="Prepare it by query.prepare; its id is made of its text.")
        return found

    def drop_database(self, db: str) -> None:
        """Forget the queries of a database that is no more."""
        with self._lock, FILE.errors(self._path):
            self._file.execute("DELETE FROM prepared WHERE db = ?", (db,))
            self._known = {id: found for id, found in self._known.items() if found.db != db}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._known)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._file.close()
