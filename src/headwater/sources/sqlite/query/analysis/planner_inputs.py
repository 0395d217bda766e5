"""What SQLite plans by, besides the definitions of tables: indexes, statistics, and the library itself.

Which row a GROUP BY shows, or in which order floats are added, is for the plan to decide. ANALYZE moves the schema's
version only when it makes its tables; and a connection plans by the statistics it read along with the schema, so two
connections may plan differently over one file. Hence the statistics are read, and a reader is made to read them, too.
"""

from __future__ import annotations

import hashlib
import threading
from weakref import WeakKeyDictionary

import apsw
import msgspec

from headwater.sources.sqlite.database_file import Connected
from headwater.sources.sqlite.query.analysis.authorizer_reads import schema_version
from headwater.sources.sqlite.query.authorizer import Guard

_LIBRARY = (apsw.sqlite3_sourceid(), *apsw.compile_options)


class _Indexes(msgspec.Struct, frozen=True):
    """Of one version of the schema."""

    version: int
    digest: bytes
    statistics: tuple[str, ...]  # the tables of ANALYZE that are there


class _Loaded(msgspec.Struct, frozen=True):
    """What a reader plans by since it stood at a moment: `moment` moves with every commit of another connection."""

    moment: int
    version: int
    digest: str


class Planning:
    """One per source; from any thread, each call with a reader of its own inside a read transaction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._indexes = _Indexes(-1, b"", ())
        self._loaded: WeakKeyDictionary[Guard, _Loaded] = WeakKeyDictionary()

    def inputs(self, reader: Connected) -> str:
        """All of it as one short text. From here on `reader` plans by nothing else."""
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
        now = _Loaded(moment, version, found.hexdigest())
        if indexes.statistics and (known is None or (known.version, known.digest) != (version, now.digest)):
            reader.guard.run("PRAGMA writable_schema = RESET")  # nothing but: read the schema and the statistics again
        with self._lock:
            self._loaded[reader.guard] = now
        return now.digest

    def _indexes_at(self, reader: Connected, version: int) -> _Indexes:
        with self._lock:
            if self._indexes.version == version:
                return self._indexes
        # Of indexes that are as good as each other SQLite takes one by their order.
        rows = reader.guard.run("SELECT name, tbl_name, sql FROM sqlite_schema WHERE type = 'index' ORDER BY rowid")
        digest = hashlib.blake2b(msgspec.msgpack.encode((_LIBRARY, rows.fetchall()))).digest()
        tables = reader.guard.run("SELECT name FROM sqlite_schema WHERE name IN ('sqlite_stat1', 'sqlite_stat4')")
        found = _Indexes(version, digest, tuple(sorted(str(name) for (name,) in tables.fetchall())))
        with self._lock:
            self._indexes = found
        return found
