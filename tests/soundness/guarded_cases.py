"""Cases in which guards suppress many changes: joins by key and first rows of an order, over few keys that change
often.
"""

from __future__ import annotations

import random
from typing import Any

from tests.soundness.differential_checker import Case
from tests.soundness.grammar import Query
from tests.soundness.random_databases import Captured
from tests.soundness.schemas import Step

SETUP = [
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, region TEXT, total INTEGER)",
    "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT COLLATE NOCASE, city TEXT)",
    "CREATE TABLE lines (id INTEGER PRIMARY KEY, ordered INTEGER, item TEXT COLLATE NOCASE)",
    "CREATE VIEW wide AS SELECT o.id, o.region, c.name, c.city FROM orders o JOIN customers c ON c.id = o.customer",
]
QUERIES = (
    "SELECT o.id, o.total, c.name FROM orders o JOIN customers c ON c.id = o.customer WHERE o.region = ?1",
    "SELECT o.id, c.name FROM orders o LEFT JOIN customers c ON c.id = o.customer WHERE o.region = ?1 ORDER BY o.id",
    "SELECT o.id, c.name FROM orders o JOIN customers c ON c.id = o.customer WHERE o.region = ?1 AND c.city = ?2",
    "SELECT id, name FROM customers WHERE id IN (SELECT customer FROM orders WHERE region = ?1)",
    "SELECT name FROM customers c WHERE EXISTS (SELECT 1 FROM orders o WHERE o.customer = c.id AND o.region = ?1)",
    "SELECT count(*), max(c.name) FROM orders o JOIN customers c ON c.id = o.customer WHERE o.total > ?3",
    "SELECT a.id, b.id, b.total FROM orders a JOIN orders b ON b.id = a.customer WHERE a.region = ?1",
    "SELECT a.id, b.id FROM orders a JOIN orders b ON b.id = a.customer WHERE a.region = ?1 AND b.region = ?1",
    "SELECT l.item, o.total FROM lines l JOIN orders o ON o.id = l.ordered WHERE o.region = ?1",
    "SELECT l.item, c.name FROM lines l JOIN orders o ON o.id = l.ordered JOIN customers c ON c.id = o.customer"
    " WHERE o.region = ?1",
    "SELECT c.id FROM customers c JOIN lines l ON l.item = c.name WHERE l.id < ?3",
    "SELECT * FROM wide WHERE region = ?1 AND city = ?2",
    # Each side is guarded by what the other holds.
    "SELECT o.id, c.name FROM orders o JOIN customers c ON c.id = o.customer WHERE o.total > ?3 AND c.city > ?2",
    "SELECT a.id, b.id FROM orders a JOIN orders b ON b.id = a.customer WHERE a.total > ?3 AND b.region > ?1",
    "SELECT id, total FROM orders WHERE region = ?1 ORDER BY total DESC, id LIMIT 3",
    "SELECT id, total FROM orders ORDER BY total, id DESC LIMIT ?3",
    "SELECT id, total FROM orders WHERE region <> ?1 ORDER BY total, id LIMIT 2 OFFSET ?3",
    "SELECT id, name FROM customers ORDER BY name, id LIMIT 2",
)


class GuardedWorld:
    """A generator of steps and queries, with the methods of `schemas.World` and `grammar.Queries`."""

    setup: list[str]

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"guarded {seed}")
        self.setup = [*SETUP, *(_write(self.dice) for _ in range(30))]

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def query(self) -> Query:
        sql = self.dice.choice(QUERIES)
        return Query(sql, {"1": self.dice.choice("ab"), "2": self.dice.choice("xy"), "3": self.dice.randrange(1, 4)})

    def step(self) -> Step:
        return Step(_writes(self.dice), self.dice.random() < 0.3)

    def schema_step(self) -> Step:
        """Return a schema change that requires a new analysis, but seldom changes an answer."""
        table, number = self.dice.choice(["orders", "customers", "lines"]), self.dice.randrange(100)
        moves = [f"ALTER TABLE {table} ADD COLUMN more{number} TEXT", f"CREATE TABLE other{number} (id)", "VACUUM"]
        return Step([self.dice.choice(moves)], foreign=True)


def guarded_case(seed: int, queries: int = 12, steps: int = 40) -> Case:
    """Return the case of a seed."""
    world = GuardedWorld(seed)
    return Case(world.setup, [world.query() for _ in range(queries)], [world.step() for _ in range(steps)])


class CapturedShop(Captured):
    """The guarded world for the kit over HTTP."""

    def made(self, seed: int) -> tuple[Any, Any]:
        world = GuardedWorld(seed)
        return world, world

    def schema_step(self) -> Step:
        for asked in self.asked:
            asked.explained = None
        step: Step = self.world.schema_step()
        return step


def _writes(dice: random.Random) -> list[str]:
    return [_write(dice) for _ in range(dice.choice([1, 1, 1, 2, 4]))]


def _write(dice: random.Random) -> str:
    key, other = dice.randrange(1, 9), dice.choice(["NULL", *range(1, 9)])
    name, total = dice.choice(["'ann'", "'Ann'", "'bob'", "'cy'", "NULL"]), dice.choice(["NULL", *range(6)])
    region, city = dice.choice(["'a'", "'b'", "'c'"]), dice.choice(["'x'", "'y'", "'z'"])
    return dice.choice(
        [
            f"INSERT OR REPLACE INTO orders VALUES ({key}, {other}, {region}, {total})",
            f"UPDATE orders SET total = {total} WHERE id = {key}",
            f"UPDATE orders SET customer = {other} WHERE id = {key}",
            f"UPDATE orders SET region = {region} WHERE id = {key}",
            f"UPDATE orders SET id = {key} WHERE id = {other} AND NOT EXISTS (SELECT 1 FROM orders WHERE id = {key})",
            f"DELETE FROM orders WHERE id = {key}",
            f"INSERT OR REPLACE INTO customers VALUES ({key}, {name}, {city})",
            f"UPDATE customers SET name = {name} WHERE id = {key}",
            f"UPDATE customers SET city = {city} WHERE id = {key}",
            f"DELETE FROM customers WHERE id = {key}",
            f"INSERT OR REPLACE INTO lines VALUES ({key}, {other}, {name})",
            f"UPDATE lines SET ordered = {other} WHERE id = {key}",
        ]
    )
