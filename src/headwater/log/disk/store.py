"""The SQLite file under a log: its tables, and the state that is not in its blocks."""

from __future__ import annotations

import secrets
from pathlib import Path

import apsw
import msgspec

from headwater.errors import LogDamaged
from headwater.log.disk import shape_store
from headwater.log.sqlite_store import FileFormat

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE note (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE block (
  first INTEGER PRIMARY KEY,
  count INTEGER NOT NULL,
  ts_first INTEGER NOT NULL,
  ts_last INTEGER NOT NULL,
  commit_ms_last INTEGER NOT NULL,
  position TEXT NOT NULL,
  id_first TEXT NOT NULL,
  id_last TEXT NOT NULL,
  whole INTEGER,          -- first offset here at which a transaction begins
  ends INTEGER NOT NULL,  -- 1: the last change here is the last of its transaction
  schemas TEXT NOT NULL,  -- numbers of the table definitions used
  bytes INTEGER NOT NULL,
  raw INTEGER NOT NULL,   -- bytes before compression
  codec INTEGER NOT NULL,
  crc INTEGER NOT NULL,   -- of data as stored
  data BLOB NOT NULL
) STRICT;
-- By time; first orders the blocks of one huge transaction; bytes lets their sum be read from here alone.
CREATE INDEX block_time ON block (ts_first, first, bytes);
"""
# By table: the last offset of deleted blocks with changes of it; "" is for blocks deleted before this was recorded.
_EVICTED = """
CREATE TABLE evicted (name TEXT PRIMARY KEY, upto INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO evicted SELECT '', value - 1 FROM meta WHERE name = 'horizon';
"""
FORMAT = FileFormat(
    "a Headwater log",
    application_id=0x48574C47,  # "HWLG"
    migrations=(_TABLES + shape_store.SCHEMA, _EVICTED),
    title="the log {path}",
)


class State(msgspec.Struct, frozen=True):
    """The state of a log: its meta entries, and the end of its newest block."""

    generation: str
    reason: str
    begun: int  # first offset of the generation
    horizon: int
    ceiling: int
    merged: int  # blocks at or below this offset need no merging
    latest: int
    position: str
    ts: int  # of the newest transaction ever appended
    bytes: int = 0  # of all stored blocks; only the writer keeps count


def new_generation(first: int, reason: str, name: str = "") -> dict[str, int | str]:
    """Return the meta entries of a generation that begins at `first`; without a `name` it gets a random one."""
    name = name or secrets.token_hex(8)
    return {"generation": name, "reason": reason, "begun": first, "horizon": first, "merged": first - 1}


def set_meta(connection: apsw.Connection, **entries: int | str) -> None:
    """Store meta entries in the open transaction."""
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", entries.items())


def load_state(path: Path, connection: apsw.Connection) -> State:
    """Read the state from the file, in one transaction; LogDamaged if it is incomplete or malformed."""
    with connection:
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        newest = connection.execute(
            "SELECT first, first + count - 1, ts_last, position, ends FROM block ORDER BY first DESC LIMIT 1"
        ).fetchone()
    try:
        return _state(meta, newest)
    except (KeyError, TypeError, ValueError) as error:
        raise LogDamaged(f"the log {path} is damaged: {error!r} in its meta table") from error


def _state(meta: dict[str, str | int], newest: tuple[int, int, int, str, int] | None) -> State:
    first, upto, ts, position, ends = newest or (0, 0, 0, "", 1)
    if not ends:
        raise ValueError("the newest transaction is not complete")
    begun = int(meta["begun"])
    return State(
        generation=str(meta["generation"]),
        reason=str(meta["reason"]),
        begun=begun,
        horizon=int(meta["horizon"]),
        ceiling=max(int(meta["ceiling"]), ts),
        merged=int(meta["merged"]),
        latest=upto if first >= begun else begun - 1,
        position=position if first >= begun else "",
        ts=ts,
    )
