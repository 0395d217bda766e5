"""`where`: a SQL predicate on rows in the log, true exactly where PostgreSQL evaluates it to true.

Python evaluates the parts that mean the same in Python and PostgreSQL; PostgreSQL evaluates the rest, on the remaining
rows. **If a needed value is unavailable** (an old row without REPLICA IDENTITY FULL, an unchanged TOAST value), the
answer is unknown: it is True unless the parts that can be evaluated are false, so that no row that may have passed the
filter is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Row, Table
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.query.predicate_engine import Engine, NormalPredicate
from headwater.sources.postgres.query.predicate_python import Program, read
from headwater.sources.postgres.query.predicate_text import Unknown
from headwater.sources.read import Pin

MAX_SHAPES = 64  # shapes whose engine is kept for the next condition; conditions hold their own


class PostgresCondition:
    """A predicate on the rows of a table. Fulfils `Condition`."""

    def __init__(self, engine: Engine, where: str, odd: Collection[str]) -> None:
        self._engine = engine
        self._found = engine.examine(where)
        self.calls = self._found.calls
        self._places = [engine.table.index[name] for name in self._found.columns]
        self._program = _program(engine, self._found, odd)
        self.pin = None if self._program is None else _pin(engine.table, self._program, odd)
        self.is_cheap: bool = self._program is not None and self._program.is_whole

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Return whether the predicate is true for each of `rows`."""
        program = self._program
        if program is None:
            return self._ask(rows)
        try:
            found = program.check(rows)
        except Unknown:
            return self._one_by_one(program, rows)
        return found if program.is_whole else self._asked_of(rows, found, [n for n, holds in enumerate(found) if holds])

    def _one_by_one(self, program: Program, rows: Sequence[Row]) -> list[bool]:
        """Evaluate each row in Python, and leave the rows that Python cannot evaluate to PostgreSQL."""
        found = [True] * len(rows)
        left = []
        for place, row in enumerate(rows):
            try:
                (found[place],) = program.check([row])
                if found[place] and not program.is_whole:
                    left.append(place)
            except Unknown:
                left.append(place)
        return self._asked_of(rows, found, left)

    def _asked_of(self, rows: Sequence[Row], found: list[bool], left: Sequence[int]) -> list[bool]:
        for place, holds in zip(left, self._ask([rows[place] for place in left]), strict=True):
            found[place] = holds
        return found

    def _ask(self, rows: Sequence[Row]) -> list[bool]:
        """Return PostgreSQL's answers; True for rows with unavailable values."""
        found = [True] * len(rows)
        known = [n for n, row in enumerate(rows) if all(row[place] is not UNAVAILABLE for place in self._places)]
        for place, holds in zip(known, self._engine.holds(self._found, [rows[n] for n in known]), strict=True):
            found[place] = holds
        return found


class Predicates:
    """The conditions of a source. Thread-safe."""

    def __init__(self, pool: Pool, odd: Callable[[], Collection[str]]) -> None:
        self._pool, self._odd = pool, odd
        self._lock = threading.Lock()  # guards _engines
        self._engines: dict[Table, Engine] = {}

    def condition(self, table: Table, where: str) -> PostgresCondition:
        """Return the predicate `where` over rows of `table`, which may be a current or an earlier shape."""
        return PostgresCondition(self._engine(table), where, self._odd())

    def _engine(self, table: Table) -> Engine:
        with self._lock:
            found = self._engines.get(table)
        if found is None:
            found = Engine(table, self._pool)
            with self._lock:
                if len(self._engines) >= MAX_SHAPES:
                    self._engines.clear()
                self._engines[table] = found
        return found


def _program(engine: Engine, found: NormalPredicate, odd: Collection[str]) -> Program | None:
    """Return the part of the predicate that Python can evaluate, if PostgreSQL confirms the parsed form."""
    try:
        program = read(engine.table, engine.type_of, tuple(odd), found.text)
    except Unknown:
        return None
    if program is None:
        return None
    understood = engine.reread([program.sql, program.theirs])
    return program if len({*understood}) == 1 else None


def _pin(table: Table, program: Program, odd: Collection[str]) -> Pin | None:
    pins = [part for part in program.parts if part.column is not None]
    best = min(pins, key=lambda part: len(part.values), default=None)
    if best is None or best.column is None:
        return None
    place = order(table, [best.column], odd)
    return Pin(best.column, frozenset(place((value,)) for value in best.values))
