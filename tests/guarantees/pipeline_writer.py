"""Runs as a separate process: writes random transactions into the tables of a pipeline until its stdin ends.

    python pipeline_writer.py PATH SEED SECONDS_BETWEEN

Keys are changed and swapped, rows come and go, some transactions are rolled back. Ends at the end of stdin.
"""

from __future__ import annotations

import random
import select
import sqlite3
import sys

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
SCHEMA = """
CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, grp TEXT, price REAL, picture BLOB, n INTEGER);
CREATE TABLE IF NOT EXISTS pair (a TEXT, b INTEGER, note TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plain (word TEXT, n INTEGER);
"""


def fill(path: str, rows: int) -> None:
    """Create the tables with `rows` rows in each."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(SCHEMA)
    if rows:
        db.execute("BEGIN")
        db.execute(
            f"{NUMBERS} INSERT INTO item SELECT i, 'g' || (i % 97), i * 0.25, zeroblob(i % 5), i FROM n", (rows,)
        )
        db.execute(f"{NUMBERS} INSERT INTO pair SELECT 'k' || (i % 1000), i, 'é' || i FROM n", (min(rows, 20_000),))
        db.execute(f"{NUMBERS} INSERT INTO plain SELECT 'w' || i, i FROM n", (min(rows, 20_000),))
        db.execute("COMMIT")
    db.close()


class Writer:
    """One connection that writes random transactions."""

    def __init__(self, path: str, seed: str) -> None:
        self.random = random.Random(seed)
        self.db = sqlite3.connect(path, isolation_level=None, timeout=60)
        self.works = [self.change] * 10 + [self.insert] * 5 + [self.delete] * 4 + [self.rekey] * 3 + [self.bulk]

    def step(self) -> None:
        """Run one transaction."""
        try:
            self.db.execute("BEGIN IMMEDIATE")
            for _ in range(self.random.randrange(1, 6)):
                self.random.choice(self.works)()
            self.db.execute("COMMIT" if self.random.random() < 0.85 else "ROLLBACK")
        except sqlite3.Error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def top(self) -> int:
        return int(self.db.execute("SELECT ifnull(max(id), 0) FROM item").fetchone()[0])

    def key(self) -> int:
        return self.random.randrange(self.top() + 10)

    def change(self) -> None:
        self.db.execute("UPDATE item SET price = ?, n = n + 1 WHERE id = ?", (self.random.random(), self.key()))
        self.db.execute("UPDATE pair SET note = ? WHERE b = ?", (f"n{self.random.random()}", self.key() % 20_000))
        self.db.execute("UPDATE plain SET n = n + 1 WHERE rowid = ?", (self.key() % 20_000,))

    def insert(self) -> None:
        word = f"x{self.random.randrange(10**9)}"
        self.db.execute("INSERT INTO item(grp, price, picture, n) VALUES (?, NULL, x'00ff', 1)", (word,))
        self.db.execute("INSERT OR REPLACE INTO pair VALUES (?, ?, ?)", (word[:3], self.key(), word))
        self.db.execute("INSERT INTO plain VALUES (?, 1)", (word,))

    def delete(self) -> None:
        self.db.execute("DELETE FROM item WHERE id = ?", (self.key(),))
        self.db.execute("DELETE FROM pair WHERE b = ?", (self.key() % 20_000,))
        self.db.execute("DELETE FROM plain WHERE rowid = ?", (self.key() % 20_000,))

    def rekey(self) -> None:
        """Move keys, and swap the keys of two rows."""
        one, two = self.key(), self.key()
        self.db.execute("UPDATE OR REPLACE item SET id = ? WHERE id = ?", (self.top() + 1, one))
        self.db.execute("UPDATE item SET id = -1 WHERE id = ?", (two,))
        self.db.execute("UPDATE OR REPLACE item SET id = ? WHERE id = ?", (two, one + 1))
        self.db.execute("UPDATE OR REPLACE item SET id = ? WHERE id = -1", (one + 1,))
        self.db.execute("UPDATE OR REPLACE pair SET b = b + 1 WHERE a = ?", (f"k{self.random.randrange(1000)}",))

    def bulk(self) -> None:
        rows = self.random.choice((10, 300, 3000))
        self.db.execute(f"{NUMBERS} INSERT INTO item(grp, n) SELECT 'bulk', i FROM n", (rows,))
        if self.random.random() < 0.3:
            self.db.execute("DELETE FROM item WHERE grp = 'bulk'")


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    writer, pause = Writer(sys.argv[1], sys.argv[2]), float(sys.argv[3])
    while not select.select([sys.stdin], [], [], writer.random.random() * 2 * pause)[0]:
        writer.step()
