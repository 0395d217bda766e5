"""The SQLite file under the registry: its tables, and the statements that read and write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import apsw
import msgspec
from msgspec.structs import replace

from headwater.errors import LogDamaged
from headwater.feeds.options import Options
from headwater.feeds.subscription import SnapshotSpan, SnapshotState, Subscription
from headwater.log.sqlite_store import FileFormat, SqliteStore, take_next_id
from headwater.model import json_decoder

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('next_id', 0);
CREATE TABLE subscription (
  id TEXT PRIMARY KEY,
  db TEXT NOT NULL,
  name TEXT,
  owner TEXT NOT NULL,
  options TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  acked INTEGER NOT NULL,
  quiet INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  snapshot TEXT,  -- without its chunks
  UNIQUE (db, name)
) STRICT, WITHOUT ROWID;
-- Within a run rows are only appended, so that a page of a long snapshot costs one row.
CREATE TABLE chunk (
  id TEXT NOT NULL,
  run INTEGER NOT NULL,
  number INTEGER NOT NULL,
  tab TEXT NOT NULL,
  end BLOB NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (id, run, number)
) STRICT, WITHOUT ROWID;
"""
# The first files of format 1 lack these; an older Headwater uses a file that has them.
_ADDITIONS = """
CREATE TABLE IF NOT EXISTS stand (
  db TEXT NOT NULL,
  instance TEXT NOT NULL,
  prefix TEXT NOT NULL,
  last INTEGER NOT NULL,
  through INTEGER NOT NULL,
  PRIMARY KEY (db, instance)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS subscription_owner ON subscription (owner);
"""
FORMAT = FileFormat(
    "subscriptions",
    application_id=0x48575342,  # "HWSB"
    migrations=(_TABLES,),
    additions=_ADDITIONS,
    aside="Move the file aside and start again: there are no subscriptions then, and clients subscribe again.",
)
_ROWS = "SELECT id, name, owner, options, created_ms, acked, quiet, paused, snapshot FROM subscription ORDER BY id"
_options = json_decoder.decoder(Options)
_CHUNKS = "SELECT tab, end, at FROM chunk WHERE id = ? AND run = ? ORDER BY number"


class InstancePosition(msgspec.Struct, frozen=True):
    """Progress of a subscribed instance: `last` changed its result, and no later offset up to `through` did."""

    instance: str
    db: str
    prefix: str  # of its tags, by the analysis of that time
    last: int
    through: int


def load_positions(connection: apsw.Connection) -> list[InstancePosition]:
    """Return every instance position in the file."""
    return [
        InstancePosition(*row) for row in connection.execute("SELECT instance, db, prefix, last, through FROM stand")
    ]


def save_positions(
    connection: apsw.Connection, kept: Sequence[InstancePosition], gone: Sequence[InstancePosition]
) -> None:
    """Write the positions `kept`, delete the positions `gone`."""
    rows = [(one.db, one.instance, one.prefix, one.last, one.through) for one in kept]
    connection.executemany("INSERT OR REPLACE INTO stand VALUES (?, ?, ?, ?, ?)", rows)
    connection.executemany("DELETE FROM stand WHERE db = ? AND instance = ?", [(one.db, one.instance) for one in gone])


def load(file: SqliteStore) -> Iterator[Subscription]:
    """Yield every subscription in the file, oldest first."""
    with file.connection() as connection:
        for id, name, owner, options, created_ms, acked, quiet, paused, snapshot in connection.execute(_ROWS):
            try:
                yield Subscription(
                    id=id,
                    name=name,
                    owner=owner,
                    options=_options.decode(options),
                    created_ms=created_ms,
                    acked=acked,
                    quiet=quiet,
                    paused=bool(paused),
                    snapshot=None if snapshot is None else _snapshot(connection, id, snapshot),
                )
            except msgspec.MsgspecError as error:
                damage = f"the file of subscriptions {file.path} is damaged: {id}: {error}"
                raise LogDamaged(damage, hint=FORMAT.aside) from error


def _snapshot(connection: apsw.Connection, id: str, text: str) -> SnapshotState:
    state = msgspec.json.decode(text, type=SnapshotState)
    return replace(state, chunks=tuple(SnapshotSpan(*row) for row in connection.execute(_CHUNKS, (id, state.run))))


# --- inside a transaction --------------------------------------------------------------------------------


def stored_bytes(options: Options) -> int:
    """Return the size of `options` in the file."""
    return len(msgspec.json.encode(options))


def next_id(connection: apsw.Connection) -> str:
    """Return an id that no subscription ever had."""
    return f"sub_{take_next_id(connection):016x}"


def count(connection: apsw.Connection, db: str | None = None) -> int:
    """Return the number of subscriptions, of one database or of all."""
    return int(connection.execute("SELECT count(*) FROM subscription WHERE ?1 IS NULL OR db = ?1", (db,)).get)


def count_of(connection: apsw.Connection, owner: str) -> int:
    """Return the number of subscriptions of the principal `owner` in all databases."""
    return int(connection.execute("SELECT count(*) FROM subscription WHERE owner = ?", (owner,)).get)


def ids_of(connection: apsw.Connection, db: str) -> list[str]:
    """Return the ids of the subscriptions of one database."""
    return [str(id) for (id,) in connection.execute("SELECT id FROM subscription WHERE db = ?", (db,))]


def named(connection: apsw.Connection, db: str, name: str) -> tuple[str, str, Options] | None:
    """Return id, owner and options of the subscription of `db` that has this name."""
    row = connection.execute(
        "SELECT id, owner, options FROM subscription WHERE db = ? AND name = ?", (db, name)
    ).fetchone()
    return None if row is None else (row[0], row[1], _options.decode(row[2]))


def insert(connection: apsw.Connection, one: Subscription) -> None:
    """Insert a subscription."""
    options = msgspec.json.encode(one.options).decode()
    connection.execute(
        "INSERT INTO subscription VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
        (one.id, one.db, one.name, one.owner, options, one.created_ms, one.acked, one.quiet, one.paused),
    )
    if one.snapshot is not None:
        set_snapshot(connection, one.id, one.snapshot)


def keep_quiet(connection: apsw.Connection, id: str, *, acked: int, quiet: int) -> bool:
    """Store that no change in (acked, quiet] concerns `id`, if it is still at `acked`; return whether `id` exists."""
    connection.execute(
        "UPDATE subscription SET quiet = CASE WHEN acked = ? THEN max(quiet, ?) ELSE quiet END WHERE id = ?",
        (acked, quiet, id),
    )
    return connection.changes() == 1


def ack(connection: apsw.Connection, id: str, offset: int) -> int:
    """Move forward to `offset`; return the acknowledged offset."""
    return int(
        connection.execute(
            "UPDATE subscription SET acked = max(acked, ?) WHERE id = ? RETURNING acked", (offset, id)
        ).get
    )


def seek(connection: apsw.Connection, id: str, offset: int) -> dict[str, Any]:
    """Set the acknowledged offset to `offset`, forwards or backwards; return the changed fields."""
    connection.execute("UPDATE subscription SET acked = ?, quiet = ? WHERE id = ?", (offset, offset, id))
    return {"acked": offset, "quiet": offset}


def set_paused(connection: apsw.Connection, id: str, paused: bool) -> dict[str, Any]:
    """Pause or resume a subscription; return the changed field."""
    connection.execute("UPDATE subscription SET paused = ? WHERE id = ?", (paused, id))
    return {"paused": paused}


def set_snapshot(connection: apsw.Connection, id: str, state: SnapshotState | None) -> None:
    """Store `state`, and those of its chunks that the file lacks."""
    chunks, run = ((), 0) if state is None else (state.chunks, state.run)
    text = None if state is None else msgspec.json.encode(replace(state, chunks=())).decode()
    connection.execute("UPDATE subscription SET snapshot = ? WHERE id = ?", (text, id))
    connection.execute("DELETE FROM chunk WHERE id = ? AND (run <> ? OR number >= ?)", (id, run, len(chunks)))
    last = connection.execute("SELECT max(number) FROM chunk WHERE id = ? AND run = ?", (id, run)).get
    connection.executemany(  # writes the last stored chunk again, because it may have been merged with the next
        "INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?, ?, ?)",
        [(id, run, n, chunks[n].table, chunks[n].end, chunks[n].offset) for n in range(last or 0, len(chunks))],
    )


def delete(connection: apsw.Connection, id: str) -> None:
    """Delete the subscription `id`."""
    connection.execute("DELETE FROM chunk WHERE id = ?", (id,))
    connection.execute("DELETE FROM subscription WHERE id = ?", (id,))
