"""Inputs of SQLite's query planner besides table definitions: indexes, statistics, and the library itself.

The plan decides which row a GROUP BY shows and in which order floats are added. ANALYZE changes the schema version
only when it creates its tables, and a connection plans with the statistics that it loaded along with the schema, so
two connections may plan differently on one file. Hence we read the statistics, and make the reader reload them.
"""

from __future__ import annotations

import hashlib
import threading
from weakref import WeakKeyDictionary

import apsw
import msgspec

from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.analysis.authorizer_reads import schema_version
from headwater.sources.sqlite.query.authorizer import Guard

_LIBRARY = (apsw.sqlite3_sourceid(), *apsw.compile_options)


class _Indexes(msgspec.Struct, frozen=True):
    """Digest of the indexes at one schema version."""

    version: int
    digest: bytes
    statistics: tuple[str, ...]  # the tables of ANALYZE that exist


class _LoadedInputs(msgspec.Struct, frozen=True):
    """Planner inputs that a reader has loaded; `moment` changes with every commit of another connection."""

    moment: int
    version: int
    digest: str


class PlannerInputs:
    """Digests of planner inputs. Thread-safe: each caller passes its own reader, inside a read transaction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _indexes and _loaded
        self._indexes = _Indexes(-1, b"", ())
        self._loaded: WeakKeyDictionary[Guard, _LoadedInputs] = WeakKeyDictionary()

    def inputs(self, reader: GuardedConnection) -> str:
        """Return a digest of all planner inputs, after making `reader` plan with exactly these."""
        ((moment,),) = reader.guard.run("PRAGMA data_version").fetchall()
        moment, version = int(str(moment)), schema_version(reader)
        with self._lock:
            known = self._loaded.get(reader.guard)
        if known is not None and (known.moment, known.version) == (moment, version):
            return known.digest
        indexes = self._indexes_at(reader, version)
        found = hashlib.blake2b(indexes.digest, digest_size=8)
        for name in indexes.statistics:
            found.update(msgspec.msgpack.encode(reader.guard.run(f"SELECT * FROM {name}").fetchall()))
        now = _LoadedInputs(moment, version, found.hexdigest())
        if indexes.statistics and (known is None or (known.version, known.digest) != (version, now.digest)):
            reader.guard.run("PRAGMA writable_schema = RESET")  # only reloads the schema and the statistics
        with self._lock:
            self._loaded[reader.guard] = now
        return now.digest

    def _indexes_at(self, reader: GuardedConnection, version: int) -> _Indexes:
        with self._lock:
            if self._indexes.version == version:
                return self._indexes
        # SQLite chooses between equally good indexes by their order.
        rows = reader.guard.run("SELECT name, tbl_name, sql FROM sqlite_schema WHERE type = 'index' ORDER BY rowid")
        digest = hashlib.blake2b(msgspec.msgpack.encode((_LIBRARY, rows.fetchall()))).digest()
        tables = reader.guard.run("SELECT name FROM sqlite_schema WHERE name IN ('sqlite_stat1', 'sqlite_stat4')")
        found = _Indexes(version, digest, tuple(sorted(str(name) for (name,) in tables.fetchall())))
        with self._lock:
            self._indexes = found
        return found
