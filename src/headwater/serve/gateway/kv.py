"""Keys and values in the table `kv` of a database, for the gateway and SochDB's gRPC services.

The first put creates the table. An expired value is not returned, and a later put deletes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest, NotFound, RequestTooLarge
from headwater.model.database_name import real_name
from headwater.model.keys.key import Span, encode_key, prefix_end
from headwater.model.kv_table import EXPIRES, KEY, SHAPE, TABLE, VALUE, holds_pairs
from headwater.model.literal import Value
from headwater.model.predicate import Call, Col, Literal, eq
from headwater.model.principal import EDITOR, VIEWER, Principal
from headwater.model.table import Row, Table
from headwater.model.work.answer_limits import weight
from headwater.queries.statements.pending_answer import T
from headwater.serve.api import Api
from headwater.serve.thread_bridge import Bridge
from headwater.sources.read import Chunk
from headwater.sources.write import Session

INDEX = f"CREATE INDEX {TABLE}_{EXPIRES} ON {TABLE} ({EXPIRES}) WHERE {EXPIRES} IS NOT NULL"  # for the sweep
MAX_TTL = 2**31  # seconds: 68 years
SWEEP_MS = 10_000  # minimum time between two sweeps of one database
SWEPT = 1_000  # rows per statement: the sweep blocks the writer
MOST_KEYS = 1_000  # in one read or one put
MOST_BYTES = 16 << 20  # of the values in one read: a short request can name a large value many times
PAGE = 500  # rows of a scan in one read


class Entry(msgspec.Struct, frozen=True):
    """A value to put under a key; with `ttl_seconds` 0 it never expires."""

    key: bytes
    value: bytes
    ttl_seconds: int = 0


class Kv:
    """The table `kv` of every database. Not thread-safe; `clock` returns milliseconds since 1970."""

    def __init__(
        self, api: Api, bridge: Bridge, clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._api, self._bridge, self._clock = api, bridge, clock
        self._swept: dict[str, int] = {}  # time of the last sweep, by database
        self.sweeping: dict[str, asyncio.Task[None]] = {}  # running sweeps, by database

    async def get(self, who: Principal, namespace: str, key: bytes) -> bytes | None:
        """Return the value under `key`; None without one."""
        (found,) = await self.get_many(who, namespace, [key])
        return found

    async def get_many(self, who: Principal, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, read one by one; RequestTooLarge if they do not fit in one answer."""
        db = self._admit(who, namespace, VIEWER, "reading keys")
        if len(keys) > MOST_KEYS:
            raise InvalidRequest(
                f"{len(keys)} keys are requested, at most {MOST_KEYS} can be read at once", hint="Request fewer keys."
            )
        return await self._bridge.call(self._read, db, keys)

    async def put(self, who: Principal, namespace: str, entries: Sequence[Entry]) -> int:
        """Put all entries or none, in one transaction; return their number. The last entry of a key wins.

        An entry is an Entry, or a gRPC message with the same fields.
        """
        db = self._admit(who, namespace, EDITOR, "putting keys")
        if len(entries) > MOST_KEYS:
            raise InvalidRequest(
                f"{len(entries)} entries are sent, at most {MOST_KEYS} can be put at once", hint="Send fewer entries."
            )
        now = self._clock()
        wanted = [(entry.key, entry.value, _end(entry.ttl_seconds, now)) for entry in entries]

        def work(_: str, session: Session) -> int:
            if wanted:
                _table(session)
            for key, value, end in wanted:
                _put(session, key, value, end)
            return len(wanted)

        count = await self._write(who, db, work)
        if now - self._swept.get(db, 0) >= SWEEP_MS and db not in self.sweeping:
            self._swept[db] = now
            # The caller does not wait for the sweep: the entries are durable even if it fails.
            self.sweeping[db] = asyncio.ensure_future(self._sweep_quietly(who, db))
        return count

    async def delete(self, who: Principal, namespace: str, key: bytes) -> bool:
        """Delete `key`; return whether it existed."""
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
        """Yield the keys that begin with `prefix` and their values, in order; `limit` 0 is all.

        Each page is consistent, several pages need not be. `hold` is called with the size in bytes of each page,
        which stays in memory until it is read.
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
        """Delete expired rows in several statements; return the number of deleted rows."""
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
            with contextlib.suppress(HeadwaterError):  # a later sweep retries
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
            if size > MOST_BYTES and len(keys) > 1:  # a single value is returned whatever its size: it cannot be split
                raise RequestTooLarge(
                    f"the values are larger than {MOST_BYTES} bytes together", hint="Request fewer keys."
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
        """Return the database's name if `role` and scope admit `who`; whether it exists is checked later."""
        db = real_name(namespace)
        who.need(role, what)
        who.check(db, [TABLE])
        return db

    async def _write(self, who: Principal, db: str, work: Callable[[str, Session], T]) -> T:
        pending = self._api.transactions.write(who, db, None, work, lambda value, _: value, as_owner=True)
        return pending.finish(await self._bridge.wait(pending.future))


def _table(session: Session) -> None:
    """Create the table `kv` with its index, unless it exists; InvalidRequest if it has other columns."""
    try:
        _checked(session.describe(TABLE))
    except NotFound:
        session.create_table(SHAPE)
        session.execute(INDEX)


def _checked(table: Table) -> Table:
    """Return `table`; InvalidRequest unless it has the columns of a key-value table."""
    if not holds_pairs(table):
        raise InvalidRequest(
            f"the table {TABLE!r} does not have the columns of a key-value table",
            hint=f"Rename it: the gateway needs ({KEY} BLOB PRIMARY KEY, {VALUE} BLOB NOT NULL, {EXPIRES} INTEGER).",
        )
    return table


def _put(session: Session, key: bytes, value: bytes, end: int | None) -> None:
    values: dict[str, Value] = {VALUE: value, EXPIRES: end}
    if not session.update(TABLE, eq(KEY, key), values, None).affected:
        session.insert(TABLE, [{KEY: key, **values}], returning=False)


def _end(ttl_seconds: int, now: int) -> int | None:
    if not 0 <= ttl_seconds <= MAX_TTL:
        raise InvalidRequest(f"ttl_seconds {ttl_seconds} is out of range", hint=f"Send 0 (never expires) to {MAX_TTL}.")
    return now + 1000 * ttl_seconds if ttl_seconds else None


def _is_live(table: Table, row: Row, now: int) -> bool:
    end = row[table.index[EXPIRES]]
    return not isinstance(end, int) or end > now


def _of(table: Table, row: Row, column: str) -> bytes:
    found = row[table.index[column]]
    return found if isinstance(found, bytes) else str(found).encode()


def _beginning(prefix: bytes) -> Span | None:
    """Return the span of the keys that begin with `prefix`; None, for all keys, if it is empty."""
    if not prefix:
        return None
    behind = prefix_end(prefix)
    end = prefix_end(encode_key((prefix,))[:1]) if behind is None else encode_key((behind,))
    return Span(encode_key((prefix,)), end)
