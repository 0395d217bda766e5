"""The writers behind feeds of SQLite: small transactions of every kind through the server."""

from __future__ import annotations

from typing import Any

from tests.guarantees.writers import EQUAL, ApiWriter, Work

KEYS = 60
LETTERS = "abcdef"
SCHEMA = (
    "CREATE TABLE item(id INTEGER PRIMARY KEY, n INTEGER, price REAL, name TEXT, mark TEXT)",
    "CREATE TABLE pair(a TEXT, b INTEGER, v, mark TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID",
    "CREATE TABLE line(x, mark TEXT)",
    "CREATE TABLE ledger(mark TEXT PRIMARY KEY, n)",
)
MOST_COLUMNS = 3  # added in one run
NAMES = (None, "", "Ann", "ann", "Zoë", "x%")


class FeedWriter(ApiWriter):
    """A writer behind feeds; with `ddl` it also adds columns."""

    def __init__(self, *args: Any, ddl: bool) -> None:
        super().__init__(*args)
        self.ddl, self.added = ddl, 0
        self.works: list[tuple[int, Work]] = [
            (6, self.insert),
            (6, self.update),
            (3, self.delete),
            (3, self.move),
            (6, self.pairs),
            (6, self.transaction),
            (2, self.lines),
            (2, self.twice),
        ]

    def key(self) -> int:
        return self.random.randrange(KEYS)

    def value(self) -> Any:
        return self.random.choice((None, 1, -0.5, 2**60, "é\x00", "A", "a", {"t": "bytes", "b64": "AP8="}))

    def row(self, mark: str) -> dict[str, Any]:
        price = self.random.choice((None, 0.5, -0.0, 7, 1e300))
        name = self.random.choice(NAMES)
        return {"id": self.random.randrange(10**6), "n": self.key(), "price": price, "name": name, "mark": mark}

    def insert(self, mark: str) -> int:
        rows = [self.row(mark) for _ in range(self.random.choice((1, 1, 2, 6)))]
        rows[0]["id"] = self.random.choice((self.key(), rows[0]["id"]))
        return self.data("insert", into={"table": "item"}, rows=rows)

    def update(self, mark: str) -> int:
        row = self.row(mark)
        del row["id"]
        return self.data("update", table={"table": "item"}, where=EQUAL, args=[self.key()], set=row)

    def delete(self, mark: str) -> int:
        self.data("delete", table={"table": "item"}, where=EQUAL, args=[self.key()])
        return 0

    def move(self, mark: str) -> int:
        if self.ddl and self.added < MOST_COLUMNS and self.random.random() < 0.15:
            self.added += 1
            table = self.random.choice(("item", "pair", "ledger"))
            self.sql(f"ALTER TABLE {table} ADD COLUMN {self.name}_{self.count}")
            return 0
        verb = self.random.choice(("UPDATE", "UPDATE OR REPLACE"))
        return self.sql(f"{verb} item SET id = ?, mark = ? WHERE id = ?", self.key(), mark, self.key())

    def pairs(self, mark: str) -> int:
        a, b = self.random.choice(LETTERS), self.random.randrange(6)
        match self.random.randrange(4):
            case 0:
                self.sql("DELETE FROM pair WHERE a = ? AND b = ?", a, b)
                return 0
            case 1:
                return self.sql("UPDATE OR REPLACE pair SET b = b + 1, mark = ? WHERE a = ?", mark, a)
            case _:
                text = "INSERT OR REPLACE INTO pair(a, b, v, mark) VALUES (?, ?, ?, ?)"
                return self.sql(text, a, b, self.value(), mark)

    def lines(self, mark: str) -> int:
        if self.random.random() < 0.2:
            self.sql("DELETE FROM line WHERE rowid % 3 = 0")
            return 0
        return self.sql("INSERT INTO line(x, mark) VALUES (?, ?), (-0.0, ?)", self.value(), mark, mark)

    def twice(self, mark: str) -> int:
        """Run a statement that fails at its second row; no row of it may be seen."""
        self.sql("INSERT INTO ledger(mark, n) VALUES (?, 1), (?, 2)", mark, mark)
        return self.must_fail(mark, 2, "a duplicate key")

    def transaction(self, mark: str) -> int:
        tx = self.ask("tx.begin")["tx"]
        changes = self.step(tx, "INSERT INTO ledger(mark, n) VALUES (?, ?)", mark, self.count)
        low = self.key()
        for _ in range(self.random.randrange(4)):
            changes += self.some_step(tx, mark, low)
        return self.commit(tx, changes)

    def some_step(self, tx: str, mark: str, low: int) -> int:
        match self.random.randrange(3):
            case 0:
                text = "UPDATE item SET n = n + 1, mark = ? WHERE id BETWEEN ? AND ?"
                return self.step(tx, text, mark, low, low + 6)
            case 1:
                self.step(tx, "DELETE FROM item WHERE id = ?", low)
                return self.step(tx, "INSERT INTO item(id, n, mark) VALUES (?, 3, ?)", low, mark)
            case _:
                return self.step(tx, "UPDATE pair SET v = ?, mark = ? WHERE b < 3", self.value(), mark)
