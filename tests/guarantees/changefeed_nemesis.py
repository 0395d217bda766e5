"""A nemesis for change feeds: one writer, several readers; servers are killed, ended and paused, and a reader stalls.

Afterwards every reader's journal is judged against the log, and what it folds to against the tables.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
from tests.guarantees.changefeed_validators import (
    CHECKPOINT,
    OPEN,
    RANGE,
    STEADY,
    VALUE,
    ZERO,
    Entry,
    Fingerprint,
    Spec,
    Ts,
    truth_of,
    validate,
)
from tests.guarantees.fault_driver import FaultDriver, ServerFaults
from tests.guarantees.server_process import Asking, Gone, Refused, ServerProcess
from tests.serve.changefeeds import Feed, at, own_message, span
from tests.suite.deadlines import PATIENCE

from headwater.log.disk.disk_log import DiskLog
from headwater.model.keys.key import encode_key

ROWS = 200
SETTINGS = """
[log]
flush_ms = 10
[feeds]
checkpoint_seconds = 0.2
slow_consumer_seconds = 0.5
"""
EVENTS = ("kill", "kill", "kill twice", "end", "flood", "calm")
KEYS = (encode_key((50,)), encode_key((120,)))
SPECS = (  # the first folds to the tables; the second is the one that stalls
    Spec(),
    Spec((("t", b"", b""),)),
    Spec((("t", *KEYS), ("u", b"", b"")), with_diff=False),
    Spec((("t", b"", KEYS[0]), ("t", KEYS[0], KEYS[1]), ("u", KEYS[0], b""))),
)
SLOW = 1


class Reader(threading.Thread):
    """Follows a change feed up to the goal; after every failure it restarts from its last checkpoint."""

    def __init__(self, server: ServerProcess, spec: Spec, name: str) -> None:
        super().__init__(name=name)
        self.server, self.spec = server, spec
        self.journal: list[Entry] = []
        self.ends: Counter[str] = Counter()
        self.goal: int | None = None
        self.may_read = threading.Event()
        self.may_read.set()
        self.given_up = threading.Event()
        self._last: tuple[Ts, str] | None = None
        self.offset = 0

    def run(self) -> None:
        while not self._is_done():
            try:
                with grpc.insecure_channel(self.server.grpc) as channel:
                    self._stream(channel)
            except grpc.RpcError as error:
                trailers = {each.key: each.value for each in error.trailing_metadata() or ()}
                self.ends[trailers.get("changefeed-reason", error.code().name)] += 1
                self.given_up.wait(0.02)  # the server is down: others work meanwhile

    def _is_done(self) -> bool:
        return self.given_up.is_set() or (self.goal is not None and self.offset >= self.goal)

    def _stream(self, channel: grpc.Channel) -> None:
        fields: dict[str, Any] = {"base_offset": 0}
        base = ZERO
        if self._last is not None:
            base, generation = self._last
            fields = {"base": own_message("Timestamp", ms=base[0], counter=base[1]), "generation": generation}
        spans = [span(*each) for each in self.spec.spans]
        with Feed(channel, timeout=120, spans=spans, with_diff=self.spec.with_diff, **fields) as feed:
            self.journal.append(Entry(OPEN, base))
            for event in feed:
                self.may_read.wait()
                self._note(event)
                if self._is_done():
                    return

    def _note(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        told = getattr(event, kind)
        match kind:
            case "value":
                value = json.loads(told.value) if told.HasField("value") else None
                prev = json.loads(told.prev_value) if told.HasField("prev_value") else None
                self.journal.append(Entry(VALUE, at(told.ts), told.offset, told.table, told.key, value, prev))
            case "delete_range":
                where = told.span
                self.journal.append(Entry(RANGE, at(told.ts), told.offset, where.table, where.start_key))
            case "checkpoint":
                of = (told.span.table, told.span.start_key, told.span.end_key) if told.HasField("span") else None
                self.journal.append(Entry(CHECKPOINT, at(told.ts), told.offset, span=of))
                if of is None:
                    self._last, self.offset = (at(told.ts), told.generation), told.offset
            case "steady_state":
                self.journal.append(Entry(STEADY))
            case "error":
                name = type(told).DESCRIPTOR.enum_types_by_name["Reason"].values_by_number[told.reason].name
                assert name in ("SLOW_CONSUMER", "SERVER_STOPPING"), told


class Writer(threading.Thread):
    """Commits one random transaction after another."""

    def __init__(self, ask: Asking, dice: random.Random, emptying: tuple[str, ...]) -> None:
        super().__init__()
        self.ask, self.random, self._emptying = ask, dice, emptying
        self.stop = threading.Event()
        self.done = 0
        self.defects: list[str] = []
        self._fresh = 10_000
        self._works: list[tuple[int, Callable[[], None]]] = [
            (6, self._put),
            (4, self._update),
            (3, self._delete),
            (3, self._move),
            (3, self._several),
            (1, self._empty),
        ]

    def run(self) -> None:
        weights = [weight for weight, _ in self._works]
        while not self.stop.wait(self.random.random() * 0.01):
            _, work = self.random.choices(self._works, weights)[0]
            try:
                work()
                self.done += 1
            except Refused as error:
                if error.code not in ("busy", "unavailable", "tx_expired", "not_found"):
                    self.defects.append(f"{work.__name__}: {error}")
            except Gone:
                self.stop.wait(0.02)

    def sql(self, text: str, **more: Any) -> None:
        self.ask("sql.exec", sql=text, **more)

    def _table(self) -> str:
        return self.random.choice("ttu")

    def _key(self) -> int:
        return self.random.randrange(ROWS)

    def _put(self) -> None:
        self.sql(self._putting(self._table()))

    def _putting(self, table: str) -> str:
        value = f"{self.random.random()}"
        return f"INSERT INTO {table} VALUES ({self._key()}, '{value}') ON CONFLICT (k) DO UPDATE SET v = excluded.v"

    def _update(self) -> None:
        low = self._key()
        self.sql(f"UPDATE {self._table()} SET v = '{self.random.random()}' WHERE k BETWEEN {low} AND {low + 20}")

    def _delete(self) -> None:
        low = self._key()
        self.sql(f"DELETE FROM {self._table()} WHERE k BETWEEN {low} AND {low + 5}")

    def _move(self) -> None:
        self._fresh += 1
        new = self._fresh if self.random.random() < 0.5 else -self._fresh
        self.sql(f"UPDATE {self._table()} SET k = {new} WHERE k = {self._key()}")

    def _several(self) -> None:
        """Run a transaction that changes one row more than once, and another table."""
        tx = self.ask("tx.begin")["tx"]
        for table in ("t", "u", "t"):
            self.sql(self._putting(table), tx=tx)
        if self.random.random() < 0.2:
            self.ask("tx.rollback", tx=tx)
        else:
            self.ask("tx.commit", tx=tx)

    def _empty(self) -> None:
        for text in self._emptying:
            with contextlib.suppress(Refused):  # half of it was done when the server was killed
                self.sql(text)


class ChangefeedNemesis(ServerFaults, FaultDriver):
    """One run; `emptying` lists the statements that empty a table at once."""

    quota, patience = (20, 60), PATIENCE

    def __init__(
        self, seed: str, folder: Path, *, rounds: int, emptying: tuple[str, ...], databases: tuple[str, ...] = ()
    ) -> None:
        super().__init__(seed, random.Random(seed))
        self.rounds = rounds
        self.data = folder / "data"
        self.server = ServerProcess(self.data, SETTINGS, databases=list(databases), said=folder / "server.err")
        self._emptying = emptying

    def _run(self) -> None:
        print(f"seed {self.seed}")
        self.server.start()
        ask = Asking(self.server)
        for table in "tu":
            ask("sql.exec", sql=f"CREATE TABLE IF NOT EXISTS {table}(k BIGINT PRIMARY KEY, v TEXT)")
            # PostgreSQL: a table that is emptied before its first row was seen looks like one that was unlogged.
            ask("sql.exec", sql=f"INSERT INTO {table} VALUES (0, 'first')")
        self.writer = Writer(Asking(self.server), random.Random(f"{self.seed}-writer"), self._emptying)
        self.readers = [Reader(self.server, spec, f"r{place}") for place, spec in enumerate(SPECS)]
        for thread in (self.writer, *self.readers):
            thread.start()
        try:
            self.drive(["kill", "flood", *(self.random.choice(EVENTS) for _ in range(self.rounds))])
            self.writer.stop.set()
            self.writer.join()
            rows = self._finish(ask)
        finally:
            self.writer.stop.set()
            for reader in self.readers:
                reader.given_up.set()
                reader.may_read.set()
            for thread in (self.writer, *self.readers):
                thread.join()
            for each in (ask, self.writer.ask):
                each.close()
        self.server.stop()
        self._judge(rows)

    @property
    def done(self) -> int:
        """Return the number of acknowledged transactions."""
        return self.writer.done

    def last_words(self) -> str:
        return self.server.last_words()

    def close(self, *, keep: bool = False) -> None:
        self.server.close()

    def do_calm(self) -> None:
        """Cause no fault while more is written."""
        self.let_work()

    def do_flood(self) -> None:
        """Write more than the buffers to a reader that takes nothing can hold, until the server disconnects it."""
        slow, ask = self.readers[SLOW], Asking(self.server)
        before = self._cut_off()
        slow.may_read.clear()
        end = time.monotonic() + PATIENCE
        while self._cut_off() == before and time.monotonic() < end:
            with contextlib.suppress(Refused, Gone):
                values = ", ".join(f"({k}, '{chr(97 + self.random.randrange(26)) * 20_000}')" for k in range(100))
                text = "ON CONFLICT (k) DO UPDATE SET v = excluded.v"
                ask("sql.exec", sql=f"INSERT INTO t(k, v) VALUES {values} {text}")
        slow.may_read.set()
        ask.close()
        assert self._cut_off() > before, "a reader that takes nothing is not cut off"

    def _cut_off(self) -> int:
        lines = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        name = "headwater_changefeed_slow_consumers_total "
        return int(float(next(line for line in lines if line.startswith(name)).split()[1]))

    def _finish(self, ask: Asking) -> dict[str, dict[bytes, Any]]:
        """Let every reader read to the end; return the rows of each table."""
        self.server.wait_caught_up()
        goal = int(ask("pull.describe", table="t")["latest"])
        for reader in self.readers:
            reader.goal = goal
        for reader in self.readers:
            reader.join(120)
            assert not reader.is_alive(), f"{reader.name} did not reach {goal}: it is at {reader.offset}, {reader.ends}"
        rows = {}
        for table in "tu":
            found = ask("sql.exec", sql=f"SELECT k, v FROM {table}")["result"]["data"]["rows"]
            rows[table] = {encode_key((k["v"],)): {"k": k["v"], "v": v.get("v")} for k, v in found}
        return rows

    def _judge(self, rows: dict[str, dict[bytes, Any]]) -> None:
        with contextlib.closing(DiskLog.open(self.data / "main.log.db", read_only=True)) as log:
            truth = truth_of(log.scan(after=0))
        failures = self.writer.defects[:5]
        for reader in self.readers:
            found = validate(reader.journal, reader.spec, truth)
            failures += [f"{reader.name} {reader.spec}: {text}" for text in found[:5]]
        fingerprint = Fingerprint(SPECS[0], truth)
        for entry in self.readers[0].journal:
            fingerprint.note(entry)
        failures += [f"{table} is another" for table in "tu" if fingerprint.rows(table) != rows[table]]
        assert not failures, "\n".join(failures)
        ends = sum((reader.ends for reader in self.readers), Counter())
        entries = sum(len(reader.journal) for reader in self.readers)
        ranges = sum(entry.kind == RANGE for entry in truth)
        print(f"  {len(truth)} versions, {ranges} of ranges, {entries} entries, {dict(ends)}; {self.events}")
        assert ranges and ends["SLOW_CONSUMER"] and ends.total() > 4 and len(truth) > 100, "too little happened"
