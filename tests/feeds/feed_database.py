"""A database for feeds without threads: tests trigger the capture, and blocking calls run in the loop."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from tests.log.memory_log import MemoryLog
from tests.sources.memory_source import MemorySource
from tests.suite.deadlines import PATIENCE

from headwater.feeds.deliver.hub import Hub
from headwater.feeds.filters.filter import NewerThanSnapshot
from headwater.feeds.formats.frame import FrameTemplate
from headwater.feeds.groups.log_reader import Delivery, View
from headwater.feeds.options import Options
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Row, Table

T = TypeVar("T")

ITEMS = Table("items", (Column("id", "i64", nullable=False), Column("size", "i64"), Column("note", "str")), ("id",))
NAMES = Table("names", (Column("name", "str", nullable=False, collation="NOCASE"), Column("size", "i64")), ("name",))
WIDER = Table("items", (*ITEMS.columns, Column("more", "str")), ("id",), 2)
WITHOUT_SIZE = Table("items", (Column("id", "i64", nullable=False), Column("note", "str")), ("id",), 2)


class Fed:
    """A `Database` for tests; `capture` brings the log up to the source in the caller's thread."""

    def __init__(self, *tables: Table, retention: int | None = None, part: int = 512, **log: Any) -> None:
        self.source = MemorySource("main", *(tables or (ITEMS, NAMES)), part=part)
        self.log = LiveLog(MemoryLog(), retention_changes=retention, **log)
        self.retention = Retention(changes=retention)
        self._begin(first=1)

    def _begin(self, *, first: int) -> None:
        self.source.restart(generation=self.log.generation, first=first)

    def commit(self, *changes: Change) -> Transaction:
        """Commit and capture one transaction."""
        made = self.source.commit(*changes)
        self.capture()
        return made

    def capture(self) -> None:
        """Capture the commits as the capture thread does, large transactions directly to disk."""
        parts = map(_stamped, self.source.follow(after=self.log.latest))
        for part in parts:
            if part.last:
                self.log.stage([part])
            else:
                self.log.append(_whole(part, parts))
        self.log.close_at(self.log.latest << 16 | 1)

    def new_generation(self) -> None:
        """Start a new generation of the log."""
        self.log.unstage()
        first = max(self.log.highest, self.source.head()) + 2
        self.log.restart(first=first, reason="a test says so")
        self._begin(first=first)

    def trim(self, changes: int) -> None:
        """Retain that many changes."""
        self.log.retain(Retention(changes=changes), now_ms=0)

    def catch_up(self, timeout: float) -> bool:
        self.capture()
        return True

    def view(self, **options: Any) -> View:
        return View(Options(db="main", **{"after": True, **options}), self.source)

    def expected(
        self, view: View, *, after: int = 0, upto: int | None = None, newer: NewerThanSnapshot | None = None
    ) -> list[Delivery]:
        """Return the deliveries of `view`, computed change by change."""
        found = []
        for part in self.log.scan(after=after, upto=upto):
            for offset, change in enumerate(part.changes, part.first):
                (op,) = view.filter.decide([change], first=offset, newer=newer)
                if op is not None:
                    found.append(Delivery(offset, op, view.encoder.change(part, offset, change, op)))
        return found


def _stamped(part: Transaction) -> Transaction:
    return msgspec.structs.replace(part, ts=(part.first - part.start) << 16)


def _whole(part: Transaction, rest: Iterator[Transaction]) -> Iterator[Transaction]:
    yield part
    for more in rest:
        yield more
        if more.last:
            return


# --- changes -------------------------------------------------------------------------------------------------


def insert(id: int, size: int = 0, note: str = "") -> Change:
    return Change(Op.INSERT, ITEMS, None, (id, size, note))


def name(text: str, size: int = 0) -> Change:
    return Change(Op.INSERT, NAMES, None, (text, size))


class Writer:
    """Writes random transactions that fit the current tables."""

    def __init__(self, fed: Fed, seed: int, *, keys: int = 20, largest: int = 5, noted: int = 3) -> None:
        self.fed, self.random = fed, random.Random(seed)
        self._keys, self._largest, self._noted = keys, largest, noted

    def write(self, count: int = 1, *, capture: bool = True) -> None:
        """Write that many transactions."""
        for _ in range(count):
            changes = self._changes()
            if changes:
                self.fed.source.commit(*changes)
            if capture:
                self.fed.capture()

    def _changes(self) -> list[Change]:
        held: dict[str, dict[Any, Row]] = {}
        for table in (ITEMS, NAMES):
            if table.name in self.fed.source.describe():
                rows = self.fed.source.chunk(table.name, after=None, span=None, limit=10**6).rows
                held[table.name] = {_known(row[0]): row for row in rows}
        made: list[Change] = []
        for _ in range(self.random.randint(1, self._largest)):
            table = ITEMS if "names" not in held or self.random.random() < 0.7 else NAMES
            made += self._change(table, held[table.name])
        return made

    def _change(self, table: Table, held: dict[Any, Row]) -> list[Change]:
        new = self._row(table)
        old = held.get(_known(new[0]))
        kind = self.random.randrange(5)
        if old is None and kind == 0 and held:  # a row moves to another key
            gone = held.pop(self.random.choice(sorted(held)))
            held[_known(new[0])] = new
            return [Change(Op.UPDATE, table, gone, new)]
        if old is not None and kind <= 1:
            del held[_known(new[0])]
            return [Change(Op.DELETE, table, old, None)]
        held[_known(new[0])] = new
        return [Change(Op.INSERT if old is None else Op.UPDATE, table, old, new)]

    def _row(self, table: Table) -> Row:
        number, size = self.random.randrange(self._keys), self.random.randrange(6)
        if table is ITEMS:
            return (number, size, "x" * self.random.randrange(self._noted))
        return (self.random.choice([str.upper, str.lower])(f"n{number:02d}"), size)


def _known(key: Any) -> Any:
    return key.lower() if isinstance(key, str) else key


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"tables": ("items",)},
    {"tables": ("items",), "where": "size > 2"},
    {"tables": ("items",), "pk": [{"t": "i64", "v": 3}]},
    {"tables": ("items",), "pk_range": {"lower_bound": {"t": "i64", "v": 5}, "upper_bound": {"t": "i64", "v": 9}}},
    {"tables": ("items",), "where": "size = 4", "before": True},
    {"tables": ("names",), "ops": ("insert", "delete"), "where": "size < 3"},
    {"tables": ("items",), "columns": ("note",)},
    {"tables": ("items",), "where": "size = 99"},
)


# --- the loop ------------------------------------------------------------------------------------------------


async def run(call: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking call in the loop, after other tasks had a turn."""
    await asyncio.sleep(0)
    return call(*args)


def hesitant(seed: int, most: int = 4) -> Callable[..., Awaitable[Any]]:
    """Run a call like `run`, with a random number of turns of other tasks before and after it."""
    chance = random.Random(seed)

    async def later(call: Callable[..., Any], *args: Any) -> Any:
        await moments(chance.randrange(most))
        found = call(*args)
        await moments(chance.randrange(most))
        return found

    return later


async def moments(count: int) -> None:
    """Let other tasks run, that many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def settled(hub: Hub, fed: Fed) -> None:
    """Wait until the hub has published everything and the readers it woke have run."""
    for _ in range(10_000):
        if hub.upto >= fed.log.latest:
            break
        await asyncio.sleep(0)
    assert hub.upto >= fed.log.latest, "the hub does not publish"
    await moments(6)


def in_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return `work()`, run in its own loop with a timeout."""

    async def bounded() -> T:
        return await asyncio.wait_for(work(), PATIENCE)

    return asyncio.run(bounded())


# --- frames --------------------------------------------------------------------------------------------------


class _Line:
    """A frame that tests can read."""

    enclosing = FrameTemplate(b"", b" ", b" ", b"\n")

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        return b"%b %b %b\n" % (str(id).encode(), word.encode(), data)


line = _Line()


class ReceivedFrame(NamedTuple):
    """One received frame."""

    id: str
    word: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


CHANGES = ("insert", "update", "delete", "schema_change", "truncate")


def frames_of(piece: bytes) -> list[ReceivedFrame]:
    """Return the frames of `piece`."""
    return [ReceivedFrame(*_split(found)) for found in piece.splitlines()]


def _split(found: bytes) -> tuple[str, str, bytes]:
    id, word, body = found.split(b" ", 2)
    return id.decode(), word.decode(), body


def changes(frames: Sequence[ReceivedFrame]) -> list[Delivery]:
    """Return the changes among `frames`."""
    return [
        Delivery(int(found.id), Op[found.word.upper()], found.body)
        for found in frames
        if found.word in CHANGES and not found.id.startswith("s:")
    ]


def words(frames: Sequence[ReceivedFrame]) -> list[str]:
    return [found.word for found in frames]
