"""Prepared queries, stored in a file; each has an id derived from its text, so that preparing twice has no effect."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections import Counter
from pathlib import Path

import msgspec

from headwater.errors import InvalidRequest, LimitExceeded, NotFound
from headwater.log.sqlite_store import FileFormat, SqliteStore
from headwater.model.principal import OWNER, RANK, is_label
from headwater.model.query.query import check_length

MAX_NAME = 200  # characters
MAX_FORM = 1 << 20  # bytes of the JSON form
MOST_BYTES = 256 << 20  # of all queries together: they are in memory
SHARE = 0.75  # of all queries and bytes: the part that viewers and editors may fill together
SHARE_OF_DATABASE = 0.25  # the same of one database: its callers leave room to those of others
_TABLES = """
CREATE TABLE prepared (
  id TEXT PRIMARY KEY,
  db TEXT NOT NULL,
  sql TEXT NOT NULL,
  form BLOB,  -- the JSON that was sent, unless it was SQL
  name TEXT
) STRICT, WITHOUT ROWID;
"""
_ROLE = "ALTER TABLE prepared ADD COLUMN role TEXT NOT NULL DEFAULT ''"  # highest role that prepared the query
FORMAT = FileFormat(
    "prepared queries",
    application_id=0x48575150,  # "HWQP"
    migrations=(_TABLES, _ROLE),
    aside="Move the file aside and start again: clients prepare their queries again, and get the same ids.",
)


class PreparedQuery(msgspec.Struct, frozen=True):
    """One query of one database."""

    id: str
    db: str
    sql: str
    form: bytes | None = None
    name: str | None = None
    role: str = ""  # highest role that prepared it; "" if the role was not recorded

    @property
    def is_owners(self) -> bool:
        """Return whether an owner, or a caller of unrecorded role, prepared the query."""
        return RANK.get(self.role, RANK[OWNER]) >= RANK[OWNER]

    @property
    def size(self) -> int:
        """Return about how many bytes of memory the query takes."""
        return 200 + len(self.sql) + len(self.form or b"") + len(self.name or "")


def query_id(db: str, sql: str) -> str:
    """Return the id of a query: always the same for the same text on the same database."""
    digest = hashlib.sha256(f"{db}\0{sql}".encode()).digest()
    return f"q_{base64.b32encode(digest[:15]).decode().lower()}"


def unknown_query() -> NotFound:
    """Return the error for an id that is not prepared, or whose database the caller must not see."""
    return NotFound("unknown query_id", hint="Prepare the query with query.prepare; its id is derived from its text.")


class PreparedQueries:
    """The prepared queries of a file, also in memory. For any thread."""

    def __init__(self, file: SqliteStore, most: int) -> None:
        self._file, self._most = file, most
        self._lock = threading.Lock()  # guards the fields below
        with file.connection() as connection:
            found = connection.execute("SELECT id, db, sql, form, name, role FROM prepared")
            self._known: dict[str, PreparedQuery] = {row[0]: PreparedQuery(*row) for row in found}
        self._used = Counter[str]()  # places and bytes of callers below owners, in all and by database
        self._bytes = 0
        for each in self._known.values():
            self._count(each)

    @classmethod
    def open(cls, path: Path, *, most: int, vfs: str | None = None) -> PreparedQueries:
        """Open the file at `path`, or create it."""
        return cls(SqliteStore(FORMAT, path, vfs=vfs), most)

    def add(
        self, db: str, sql: str, *, form: bytes | None = None, name: str | None = None, role: str = ""
    ) -> PreparedQuery:
        """Store a query that `role` prepared, or update name and role of a stored one; LimitExceeded if full."""
        check_length(len(sql))
        if name is not None and not (is_label(name) and len(name) <= MAX_NAME):
            raise InvalidRequest(f"`name` must be a text of 1 to {MAX_NAME} printable characters")
        if len(form or b"") > MAX_FORM:
            raise InvalidRequest(f"the query exceeds {MAX_FORM} bytes", hint="Bind long values as arguments.")
        made = PreparedQuery(query_id(db, sql), db, sql, form, name, role)
        with self._lock:
            if (known := self._known.get(made.id)) is not None:
                return self._renew(known, known.name if name is None else name, role)
            self._check_room(made)
            with self._file.connection() as connection:
                row = msgspec.structs.astuple(made)
                connection.execute("INSERT INTO prepared VALUES (?, ?, ?, ?, ?, ?)", row)
            self._known[made.id] = made
            self._count(made)
            return made

    def _check_room(self, made: PreparedQuery) -> None:
        """Raise LimitExceeded if there is no room for one more query. The caller holds the lock."""
        taken = [(len(self._known), self._bytes, 1.0)]
        if not made.is_owners:
            taken += [
                (self._used["places"], self._used["bytes"], SHARE),
                (self._used[f"places of {made.db}"], self._used[f"bytes of {made.db}"], SHARE_OF_DATABASE),
            ]
        for places, size, share in taken:
            if places >= max(self._most * share, 1) or size + made.size > MOST_BYTES * share:
                raise LimitExceeded(
                    f"{places} queries are prepared, which is the limit" + (" for this role" if share < 1 else ""),
                    hint="Bind values that differ as arguments, or raise queries.max_prepared.",
                )

    def _count(self, each: PreparedQuery, sign: int = 1) -> None:
        """Count a query that was added, or with `sign` -1 one that was removed."""
        self._bytes += sign * each.size
        if not each.is_owners:
            self._used["places"] += sign
            self._used["bytes"] += sign * each.size
            self._used[f"places of {each.db}"] += sign
            self._used[f"bytes of {each.db}"] += sign * each.size

    def _renew(self, known: PreparedQuery, name: str | None, role: str) -> PreparedQuery:
        """Update the name and role, unless a higher role prepared the query. The caller holds the lock."""
        if RANK.get(role, 0) < RANK.get(known.role, 0):
            return known
        if (name, role) == (known.name, known.role):
            return known
        with self._file.connection() as connection:
            connection.execute("UPDATE prepared SET name = ?, role = ? WHERE id = ?", (name, role, known.id))
        renewed = self._known[known.id] = msgspec.structs.replace(known, name=name, role=role)
        self._count(known, -1)
        self._count(renewed)
        return renewed

    def get(self, id: str) -> PreparedQuery:
        """Return the query with this id; NotFound if there is none."""
        found = self._known.get(id)
        if found is None:
            raise unknown_query()
        return found

    def drop_database(self, db: str) -> None:
        """Delete the queries of a dropped database."""
        with self._lock, self._file.connection() as connection:
            connection.execute("DELETE FROM prepared WHERE db = ?", (db,))
            for each in [each for each in self._known.values() if each.db == db]:
                del self._known[each.id]
                self._count(each, -1)

    @property
    def count(self) -> int:
        """Return the number of prepared queries."""
        return len(self._known)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
