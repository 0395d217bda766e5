"""The writers behind feeds: small transactions of every kind through the server, under marks that tell them apart."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from clients import NOTHING_KEPT, OPEN_END, History
from feed_truth import DEFAULT
from server_process import Asking, Gone, Refused

KEYS = 60
LETTERS = "abcdef"
SCHEMA = (
    "CREATE TABLE item(id INTEGER PRIMARY KEY, n INTEGER, price REAL, name TEXT, mark TEXT)",
    "CREATE TABLE pair(a TEXT, b INTEGER, v, mark TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID",
    "CREATE TABLE line(x, mark TEXT)",
    "CREATE TABLE ledger(mark TEXT PRIMARY KEY, n)",
)
MOST_COLUMNS = 3  # added in one run


class FeedWriter:
    """One thread's dice and connection. `may_write` holds it back while the recorder of the truth is behind."""

    def __init__(
        self,
        ask: Asking,
        history: History,
        dice: random.Random,
        name: str,
        may_write: Callable[[], object],
        *,
        ddl: bool,
    ) -> None:
        self.ask, self.history, self.random, self.name = ask, history, dice, name
        self.may_write, self.ddl = may_write, ddl
        self.count, self.added = 0, 0
        self.works = [self.insert] * 6 + [self.update] * 6 + [self.delete] * 3 + [self.move] * 3
        self.works += [self.pairs] * 6 + [self.transaction] * 6 + [self.lines] * 2 + [self.twice] * 2

    def run(self, stop: threading.Event) -> None:
        """Write until told to stop."""
        try:
            while not stop.wait(self.random.random() * 0.012):
                self.may_write()
                self.count += 1
                self._attempt(self.random.choice(self.works), f"{self.name}-{self.count}")
        finally:
            self.ask.close()

    def _attempt(self, work: Callable[[str], Any], mark: str) -> None:
        try:
            work(mark)
            self.history.acknowledge(mark, 0)
            self.history.saw("ok")
        except Refused as error:
            self.history.saw(error.code)
            if error.code in NOTHING_KEPT:
                self.history.refuse(mark)
            elif error.code not in OPEN_END:
                self.history.defect(f"{work.__name__}: {error}")
        except Gone:
            self.history.saw("gone")
            time.sleep(0.02)

    def sql(self, text: str, *args: Any, **more: Any) -> None:
        self.ask("sql.exec", sql=text, args=list(args), **more)

    def key(self) -> int:
        return self.random.randrange(KEYS)

    def value(self) -> Any:
        return self.random.choice((None, 1, -0.5, 2**60, "é\x00", "A", "a", {"t": "bytes", "b64": "AP8="}))

    def row(self, mark: str) -> dict[str, Any]:
        price = self.random.choice((None, 0.5, -0.0, 7, 1e300))
        name = self.random.choice((None, "", "Ann", "ann", "Zoë", "x%"))
        return {"id": self.random.randrange(10**6), "n": self.key(), "price": price, "name": name, "mark": mark}

    def insert(self, mark: str) -> None:
        rows = [self.row(mark) for _ in range(self.random.choice((1, 1, 2, 6)))]
        rows[0]["id"] = self.random.choice((self.key(), rows[0]["id"]))
        self.ask("data.insert", into={"table": "item"}, rows=rows)

    def update(self, mark: str) -> None:
        where = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}
        row = self.row(mark)
        del row["id"]
        self.ask("data.update", table={"table": "item"}, where=where, args=[self.key()], set=row)

    def delete(self, mark: str) -> None:
        where = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}
        self.ask("data.delete", table={"table": "item"}, where=where, args=[self.key()])

    def move(self, mark: str) -> None:
        if self.ddl and self.added < MOST_COLUMNS and self.random.random() < 0.15:
            self.added += 1
            table = self.random.choice(("item", "pair", "ledger"))
            self.sql(f"ALTER TABLE {table} ADD COLUMN {self.name}_{self.count} DEFAULT '{DEFAULT}'")
            return
        verb = self.random.choice(("UPDATE", "UPDATE OR REPLACE"))
        self.sql(f"{verb} item SET id = ?, mark = ? WHERE id = ?", self.key(), mark, self.key())

    def pairs(self, mark: str) -> None:
        a, b = self.random.choice(LETTERS), self.random.randrange(6)
        match self.random.randrange(4):
            case 0:
                self.sql("DELETE FROM pair WHERE a = ? AND b = ?", a, b)
            case 1:
                self.sql("UPDATE OR REPLACE pair SET b = b + 1, mark = ? WHERE a = ?", mark, a)
            case _:
                self.sql("INSERT OR REPLACE INTO pair(a, b, v, mark) VALUES (?, ?, ?, ?)", a, b, self.value(), mark)

    def lines(self, mark: str) -> None:
        if self.random.random() < 0.2:
            self.sql("DELETE FROM line WHERE rowid % 3 = 0")
        else:
            self.sql("INSERT INTO line(x, mark) VALUES (?, ?), (-0.0, ?)", self.value(), mark, mark)

    def twice(self, mark: str) -> None:
        """A statement that fails at its second row: nothing of it may be seen."""
        self.sql("INSERT INTO ledger(mark, n) VALUES (?, 1), (?, 2)", mark, mark)

    def transaction(self, mark: str) -> None:
        tx = self.ask("tx.begin")["tx"]
        try:
            self.sql("INSERT INTO ledger(mark, n) VALUES (?, ?)", mark, self.count, tx=tx)
            low = self.key()
            for _ in range(self.random.randrange(4)):
                self._step(mark, low, tx)
        except Gone as error:
            raise Refused({"code": "tx_expired", "message": "never committed"}) from error
        if self.random.random() < 0.25:
            self.ask("tx.rollback", tx=tx)
            raise Refused({"code": "tx_expired", "message": "rolled back on purpose"})
        self.ask("tx.commit", tx=tx)

    def _step(self, mark: str, low: int, tx: str) -> None:
        match self.random.randrange(3):
            case 0:
                self.sql("UPDATE item SET n = n + 1, mark = ? WHERE id BETWEEN ? AND ?", mark, low, low + 6, tx=tx)
            case 1:
                self.sql("DELETE FROM item WHERE id = ?", low, tx=tx)
                self.sql("INSERT INTO item(id, n, mark) VALUES (?, 3, ?)", low, mark, tx=tx)
            case _:
                self.sql("UPDATE pair SET v = ?, mark = ? WHERE b < 3", self.value(), mark, tx=tx)
