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

MAX_TEXT = 100_000  # characters
BLANKS = " \t\n\f\r"  # as SQL knows them
_SCHEMA = """
CREATE TABLE prepared (
  id TEXT PRIMARY KEY,
  db TEXT NOT NULL,
  sql TEXT NOT NULL,
  form BLOB,  -- the JSON it was sent as, where it was
  name TEXT
) STRICT, WITHOUT ROWID;
"""
FILE = OwnFile(
    "prepared queries",
    application_id=0x48575150,  # "HWQP"
    format=1,
    schema=_SCHEMA,
    aside="Move the file aside and start again: clients prepare their queries anew, and get the same ids.",
)


class Prepared(msgspec.Struct, frozen=True):
    """One query of one database."""

    id: str
    db: str
    sql: str
    form: bytes | None = None
    name: str | None = None


def canonical(sql: str) -> str:
    """A text without what stands around it: blanks, and semicolons at its end."""
    return sql.strip(BLANKS).rstrip(BLANKS + ";")


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
        found = connection.execute("SELECT id, db, sql, form, name FROM prepared")
        self._known: dict[str, Prepared] = {row[0]: Prepared(*row) for row in found}

    @classmethod
    def open(cls, path: Path, *, most: int, vfs: str | None = None) -> PreparedQueries:
        """The queries in the file at `path`."""
        with FILE.errors(path):
            return cls(path, most, FILE.connect(path, vfs=vfs))

    def add(self, db: str, sql: str, *, form: bytes | None = None, name: str | None = None) -> Prepared:
        """Keep a query that was found to be sound; the one that is there if it was kept before, under the last name
        that was given."""
        if len(sql) > MAX_TEXT:
            raise InvalidRequest(f"a query has at most {MAX_TEXT} characters", hint="Bind long values as arguments.")
        made = Prepared(query_id(db, sql), db, sql, form, name)
        with self._lock:
            if (known := self._known.get(made.id)) is not None:
                return known if name is None or name == known.name else self._rename(known, name)
            if len(self._known) >= self._most:
                raise LimitExceeded(
                    f"{self._most} queries are prepared, and no more are kept",
                    hint="Bind what differs as arguments, or raise queries.max_prepared.",
                )
            with FILE.errors(self._path):
                row = (made.id, made.db, made.sql, made.form, made.name)
                self._file.execute("INSERT INTO prepared VALUES (?, ?, ?, ?, ?)", row)
            self._known[made.id] = made
            return made

    def _rename(self, known: Prepared, name: str) -> Prepared:
        """The lock is held."""
        with FILE.errors(self._path):
            self._file.execute("UPDATE prepared SET name = ? WHERE id = ?", (name, known.id))
        renamed = self._known[known.id] = msgspec.structs.replace(known, name=name)
        return renamed

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
