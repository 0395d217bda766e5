"""Runs as a process of its own, like `foreign_writer.py`, over the tables behind feeds.

python -m tests.guarantees.feed_foreign_writer PATH SEED NAME rows
"""

from __future__ import annotations

import select
import sys

from tests.guarantees.foreign_writer import Writer


class FeedWriter(Writer):
    """A slower writer with small transactions, because readers are many and the log may be short."""

    def __init__(self, path: str, seed: str, name: str, works: str) -> None:
        super().__init__(path, seed, name, works)
        self.works = [self.items] * 4 + [self.moves] * 2 + [self.letters] * 3 + [self.many]

    def key(self) -> int:
        return self.random.randrange(60)

    def items(self, mark: str) -> None:
        self.mark("INSERT INTO ledger(mark, n) VALUES (?, ?)", mark, self.count)
        self.mark("UPDATE item SET n = n + 1, price = -n, mark = ? WHERE id = ?", mark, self.key())
        self.db.execute("SAVEPOINT s")
        self.db.execute("UPDATE item SET n = -1, mark = 'never' WHERE id < 50")
        self.db.execute("ROLLBACK TO s")
        self.db.execute("DELETE FROM item WHERE id = ?", (self.key(),))

    def moves(self, mark: str) -> None:
        self.mark("INSERT OR REPLACE INTO item(id, n, name, mark) VALUES (?, 0, 'f', ?)", self.key(), mark)
        self.mark("UPDATE OR REPLACE item SET id = ?, mark = ? WHERE id = ?", self.key(), mark, self.key())

    def letters(self, mark: str) -> None:
        letter = self.random.choice("abcdef")
        self.mark("INSERT OR REPLACE INTO pair(a, b, v, mark) VALUES (?, ?, x'00ff', ?)", letter, self.key() % 6, mark)
        self.mark("UPDATE OR REPLACE pair SET a = 'c', mark = ? WHERE a = ? AND b = 2", mark, letter)

    def many(self, mark: str) -> None:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)"
        self.mark(f"{numbers} INSERT INTO line(x, mark) SELECT i * 0.5, ? FROM n", mark)
        self.db.execute("DELETE FROM line WHERE rowid % 2 = 0")


if __name__ == "__main__":
    writer = FeedWriter(*sys.argv[1:5])
    while not select.select([sys.stdin], [], [], writer.random.random() * 0.1)[0]:
        writer.step()
