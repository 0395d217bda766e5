"""Random transactions of two sessions, with savepoints, rollbacks and DDL: the changes fold to the table's rows."""

import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.sources.postgres.pg_server import Stream

from headwater.model.change import Op, Transaction
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Key

LARGE = "repeat(md5(random()::text), 100)"
Session = psycopg.Connection[tuple[Any, ...]]


class Fold:
    """The rows of a reader of all changes."""

    def __init__(self) -> None:
        self.rows: dict[Key, dict[str, Any]] = {}
        self.taken = 0
        self.open = ""  # the transaction whose last part has not come

    def take(self, part: Transaction) -> None:
        assert part.id == self.open if part.start else not self.open
        self.open = "" if part.last else part.id
        self.taken += len(part.changes)
        for change in part.changes:
            if change.op is Op.TRUNCATE:
                self.rows.clear()
            if change.op is Op.SCHEMA_CHANGE or change.op is Op.TRUNCATE:
                continue
            old: dict[str, Any] = {}
            if change.before is not None:
                old = self.rows.pop(change.table.key_of(change.before))
                for name, value in zip(change.table.names, change.before, strict=True):
                    assert value is UNAVAILABLE or value == old.get(name), (change, old)
            if change.after is not None:
                key = change.table.key_of(change.after)
                assert key not in self.rows
                pairs = zip(change.table.names, change.after, strict=True)
                self.rows[key] = {name: old[name] if value is UNAVAILABLE else value for name, value in pairs}


def statement(rng: random.Random, low: int, alone: bool) -> str:
    """Return a statement on keys from `low` on, which only one session uses; with `alone` it may lock the table."""
    key, size = low + rng.randrange(3000), rng.choice([1, 5, 40, 800, 2000])
    return rng.choice(
        [
            f"INSERT INTO t SELECT n, n, 'x', NULL FROM generate_series({key}, {key + size}) n ON CONFLICT DO NOTHING",
            f"INSERT INTO t VALUES ({key}, 0, '', {LARGE}) ON CONFLICT DO NOTHING",
            f"UPDATE t SET n = n + 1 WHERE id BETWEEN {key} AND {key + size}",
            f"UPDATE t SET s = {LARGE} WHERE id = {key}",
            f"UPDATE t SET id = id + 10000 WHERE id BETWEEN {key} AND {key + size}",
            f"DELETE FROM t WHERE id BETWEEN {key} AND {key + size} OR id >= {low + 10000} AND id < {low + 100000}",
            *(["ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t REPLICA IDENTITY DEFAULT"] * alone),
            *(["TRUNCATE t"] * (alone and rng.random() < 0.2)),
        ]
    )


def step(rng: random.Random, session: Session, low: int, depth: list[str], alone: bool) -> None:
    """Run one random step of a transaction: a statement, a savepoint command, or its end."""
    what = rng.random()
    if what < 0.15:
        depth.append(f"s{len(depth)}")
        session.execute(f"SAVEPOINT {depth[-1]}")
    elif what < 0.35 and depth:
        place = rng.randrange(len(depth))
        session.execute(f"{rng.choice(['ROLLBACK TO', 'RELEASE'])} {depth[place]}")
        del depth[place:]
    elif what < 0.45:
        session.commit() if rng.random() < 0.7 else session.rollback()
        depth.clear()
    else:
        try:
            session.execute(statement(rng, low, alone))
        except psycopg.errors.UniqueViolation:  # and with it goes the transaction
            session.rollback()
            depth.clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_transactions_fold_to_the_rows_of_the_table(stream: Callable[..., Stream], seed: int) -> None:
    rng = random.Random(seed)
    one = stream(
        "CREATE TABLE t (id int PRIMARY KEY, n int, s text, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        *(["ALTER TABLE t REPLICA IDENTITY FULL"] if seed % 2 else []),
        *(f"INSERT INTO t SELECT n, n, 'x', NULL FROM generate_series({low}, {low + 3000}) n" for low in (0, 200_000)),
        streaming="off" if seed % 3 == 2 else "on",
    )
    alone = seed % 4 == 3
    assembly, fold = one.assembly(), Fold()
    with one.server.connect(one.name) as left, one.server.connect(one.name) as right:
        sessions: list[tuple[Session, int, list[str]]] = (
            [(left, 0, [])] if alone else [(left, 0, []), (right, 200_000, [])]
        )
        for session, _, _ in sessions:
            session.autocommit = False
        for number in range(120):
            session, low, depth = rng.choice(sessions)
            step(rng, session, low, depth, alone)
            if number % 40 == 39:
                for item in one.items(assembly):
                    assert isinstance(item, Transaction)
                    fold.take(item)
        for session, _, _ in sessions:
            session.commit()
    for item in one.items(assembly):
        assert isinstance(item, Transaction)
        fold.take(item)
    names = ("id", "n", "s", "big")
    rows = one.db.execute("SELECT id, n, s, big FROM t").fetchall()
    assert fold.rows == {(row[0],): dict(zip(names, row, strict=True)) for row in rows}
    assert assembly.is_idle and fold.taken > 6000
