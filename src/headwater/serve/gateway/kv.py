"""Keys and values: the table `kv` of a database, for those faces that know no other.

The table is made by the first put. A value may have an end: after it nobody reads it, and a later put sweeps it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest, NotFound, RequestTooLarge
from headwater.model.answer_limits import weight
from headwater.model.database_name import real_name
from headwater.model.keys.key import Span, encode_key, prefix_end
from headwater.model.kv_table import EXPIRES, KEY, SHAPE, TABLE, VALUE, holds_pairs
from headwater.model.literal import Value
from headwater.model.predicate import Call, Col, Literal, eq
from headwater.model.principal import EDITOR, VIEWER, Principal
from headwater.model.table import Row, Table
from headwater.queries.statements.pending_answer import T
from headwater.serve.api import Api
from headwater.serve.thread_bridge import Bridge
from headwater.sources.read import Chunk
from headwater.sources.write import Session

INDEX = f"CREATE INDEX {TABLE}_{EXPIRES} ON {TABLE} ({EXPIRES}) WHERE {EXPIRES} IS NOT NULL"  # what a sweep reads
MAX_TTL = 2**31  # seconds: 68 years
SWEEP_MS = 10_000  # between two sweeps of one database
SWEPT = 1_000  # rows at a time: the writer is held meanwhile
MOST_KEYS = 1_000  # in one read, or in one put
MOST_BYTES = 16 << 20  # of the values of one read: a short request may name a long value often
PAGE = 500  # rows of a scan in one read


class Put(Protocol):
    """A value to put under a key, such as a message of gRPC; `ttl_seconds` 0 keeps it for good."""

    @property
    def key(self) -> bytes: ...

    @property
    def value(self) -> bytes: ...

    @property
    def ttl_seconds(self) -> int: ...


class Entry(msgspec.Struct, frozen=True):
    """A value to put under a key; see Put."""

    key: bytes
    value: bytes
    ttl_seconds: int = 0


class Kv:
    """The table `kv` of every database. In the loop; `clock` counts milliseconds of the epoch."""

    def __init__(
        self, api: Api, bridge: Bridge, clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._api, self._bridge, self._clock = api, bridge, clock
        self._swept: dict[str, int] = {}  # by database: when
        self.sweeping: dict[str, asyncio.Task[None]] = {}  # by database: the sweep that is under way

    async def get(self, who: Principal, namespace: str, key: bytes) -> bytes | None:
        """The value under `key`; None where there is none."""
        (found,) = await self.get_many(who, namespace, [key])
        return found

    async def get_many(self, who: Principal, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """What each of `keys` has, each read by itself; RequestTooLarge where that is more than one answer holds."""
        db = self._admit(who, namespace, VIEWER, "reading keys")
        if len(keys) > MOST_KEYS:
            raise InvalidRequest(
                f"{len(keys)} keys are asked for, and {MOST_KEYS} are read at once", hint="Ask for fewer at a time."
            )
        return await self._bridge.call(self._read, db, keys)

    async def put(self, who: Principal, namespace: str, entries: Sequence[Put]) -> int:
        """Put all of them or none, in one transaction; how many. Of one key twice the last one counts."""
        db = self._admit(who, namespace, EDITOR, "putting keys")
        if len(entries) > MOST_KEYS:
            raise InvalidRequest(
                f"{len(entries)} entries are sent, and {MOST_KEYS} are put at once", hint="Send fewer at a time."
            )
        now = self._clock()
        wanted = [(entry.key, entry.value, _end(entry, now)) for entry in entries]

        def work(_: str, session: Session) -> int:
            if wanted:
                _table(session)
            for key, value, end in wanted:
                _put(session, key, value, end)
            return len(wanted)

        count = await self._write(who, db, work)
        if now - self._swept.get(db, 0) >= SWEEP_MS and db not in self.sweeping:
            self._swept[db] = now
            # Nobody waits for it: what was put is durable, whatever becomes of the sweep.
            self.sweeping[db] = asyncio.ensure_future(self._sweep_quietly(who, db))
        return count

    async def delete(self, who: Principal, namespace: str, key: bytes) -> bool:
        """Delete `key`; whether it was there."""
        db = self._admit(who, namespace, EDITOR, "deleting keys")
        now = self._clock()

        def work(_: str, session: Session) -> bool:
            try:
                table = _checked(session.describe(TABLE))
            except NotFound:
                return False
            found = session.select(TABLE, eq(KEY, key), 1)
            session.delete(TABLE, eq(KEY, key), None)
            return any(_is_live(table, row, now) for row in found)

        return await self._write(who, db, work)

    async def scan(
        self,
        who: Principal,
        namespace: str,
        prefix: bytes = b"",
        limit: int = 0,
        hold: Callable[[int], None] = lambda size: None,
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, and their values, in order; `limit` 0 is all.

        Page by page: each page is of one moment, all of them need not be. `hold` is called with the bytes of each page,
        which stays in memory until all of it is read.
        """
        db = self._admit(who, namespace, VIEWER, "reading keys")
        after: bytes | None = None
        sent = 0
        while (page := await self._bridge.call(self._page, db, after, prefix)) is not None:
            hold(sum(map(weight, page.rows)))
            now = self._clock()
            for row in page.rows:
                if _is_live(page.table, row, now):
                    yield _of(page.table, row, KEY), _of(page.table, row, VALUE)
                    sent += 1
                    if sent == limit:
                        return
            if page.next_key is None:
                return
            after = bytes(page.next_key[0])  # type: ignore[arg-type]  # a column of bytes holds bytes

    async def sweep(self, who: Principal, namespace: str) -> int:
        """Delete what has ended, some of it at a time; how many."""
        db = self._admit(who, namespace, EDITOR, "sweeping keys")
        ended = Call("le", (Col(EXPIRES), Literal(self._clock())))

        def work(_: str, session: Session) -> int:
            try:
                _checked(session.describe(TABLE))
            except NotFound:
                return 0
            return session.delete(TABLE, ended, SWEPT).affected

        total = 0
        while found := await self._write(who, db, work):
            total += found
            if found < SWEPT:
                break
        return total

    async def _sweep_quietly(self, who: Principal, db: str) -> None:
        try:
            with contextlib.suppress(HeadwaterError):  # a later one tries again
                await self.sweep(who, db)
        finally:
            del self.sweeping[db]

    # --- in threads --------------------------------------------------------------------------------------------------

    def _read(self, db: str, keys: Sequence[bytes]) -> list[bytes | None]:
        source, now = self._api.databases.get(db), self._clock()
        tables = source.describe()
        if TABLE not in tables:
            return [None for _ in keys]
        _checked(tables[TABLE])
        found: list[bytes | None] = []
        size = 0
        for key in keys:
            table, row, _ = source.get(TABLE, (key,))
            is_there = row is not None and _is_live(table, row, now)
            value = _of(table, row, VALUE) if row is not None and is_there else None
            found.append(value)
            size += len(key) + len(value or b"")
            if size > MOST_BYTES and len(keys) > 1:  # one value is given whatever its size: there is no smaller way
                raise RequestTooLarge(
                    f"the values are larger than {MOST_BYTES} bytes together", hint="Ask for fewer keys at a time."
                )
        return found

    def _page(self, db: str, after: bytes | None, prefix: bytes) -> Chunk | None:
        source = self._api.databases.get(db)
        if TABLE not in source.describe():
            return None
        found = source.chunk(TABLE, after=None if after is None else (after,), span=_beginning(prefix), limit=PAGE)
        _checked(found.table)
        return found

    # --- writing -----------------------------------------------------------------------------------------------------

    def _admit(self, who: Principal, namespace: str, role: str, what: str) -> str:
        """The name of the database; whether it exists is for those to know who may see it."""
        db = real_name(namespace)
        who.need(role, what)
        who.check(db, [TABLE])
        return db

    async def _write(self, who: Principal, db: str, work: Callable[[str, Session], T]) -> T:
        pending = self._api.transactions.write(who, db, None, work, lambda value, _: value, as_owner=True)
        return pending.finish(await self._bridge.wait(pending.future))


def _table(session: Session) -> None:
    """The table, made if it is not there."""
    try:
        _checked(session.describe(TABLE))
    except NotFound:
        session.create_table(SHAPE)
        session.execute(INDEX)


def _checked(table: Table) -> Table:
    """`table`, if it is one that we would have made."""
    if not holds_pairs(table):
        raise InvalidRequest(
            f"the table {TABLE!r} is not one of keys and values",
            hint=f"It needs ({KEY} BLOB PRIMARY KEY, {VALUE} BLOB NOT NULL, {EXPIRES} INTEGER): rename yours.",
        )
    return table


def _put(session: Session, key: bytes, value: bytes, end: int | None) -> None:
    values: dict[str, Value] = {VALUE: value, EXPIRES: end}
    if not session.update(TABLE, eq(KEY, key), values, None).affected:
        session.insert(TABLE, [{KEY: key, **values}], returning=False)


def _end(entry: Put, now: int) -> int | None:
    if not 0 <= entry.ttl_seconds <= MAX_TTL:
        raise InvalidRequest(f"ttl_seconds is from 0 (for good) to {MAX_TTL}, not {entry.ttl_seconds}")
    return now + 1000 * entry.ttl_seconds if entry.ttl_seconds else None


def _is_live(table: Table, row: Row, now: int) -> bool:
    end = row[table.index[EXPIRES]]
    return not isinstance(end, int) or end > now


def _of(table: Table, row: Row, column: str) -> bytes:
    found = row[table.index[column]]
    return found if isinstance(found, bytes) else str(found).encode()


def _beginning(prefix: bytes) -> Span | None:
    """The span of the keys that begin with `prefix`."""
    if not prefix:
        return None
    behind = prefix_end(prefix)
    end = prefix_end(encode_key((prefix,))[:1]) if behind is None else encode_key((behind,))
    return Span(encode_key((prefix,)), end)
