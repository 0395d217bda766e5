"""`where`: a SQL predicate on rows in the log, true exactly where PostgreSQL evaluates it to true.

Python evaluates the parts that mean the same in Python and PostgreSQL; PostgreSQL evaluates the rest, on the remaining
rows. **If a needed value is unavailable** (an old row without REPLICA IDENTITY FULL, an unchanged TOAST value), the
answer is unknown: it is True unless the parts that can be evaluated are false, so that no row that may have passed the
filter is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Row, Table
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.query.predicate_engine import Engine, NormalPredicate
from headwater.sources.postgres.query.predicate_python import Program, read
from headwater.sources.python_predicate import Unknown, ask_at, narrowest_pin

MAX_SHAPES = 64  # shapes whose engine is kept for the next condition; conditions hold their own


class PostgresCondition:
    """A predicate on the rows of a table. Fulfils `Condition`."""

    def __init__(self, engine: Engine, where: str, odd: Collection[str]) -> None:
        self._engine = engine
        self._found = engine.examine(where)
        self.calls = self._found.calls
        self._places = [engine.table.index[name] for name in self._found.columns]
        program = self._program = _program(engine, self._found, odd)
        table = engine.table
        self.pin = None if program is None else narrowest_pin(program.parts, lambda name: order(table, [name], odd))
        self.is_cheap: bool = program is not None and program.is_whole

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether the predicate is true; true also if a needed value is unavailable."""
        program = self._program
        if program is None:
            return self._ask(rows)
        try:
            found = program.check(rows)
        except Unknown:
            return self._one_by_one(program, rows)
        if program.is_whole:
            return found
        return ask_at([place for place, holds in enumerate(found) if holds], rows, found, self._ask)

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
        return ask_at(left, rows, found, self._ask)

    def _ask(self, rows: Sequence[Row]) -> list[bool]:
        """Return PostgreSQL's answers; True for rows with unavailable values."""
        known = [n for n, row in enumerate(rows) if all(row[place] is not UNAVAILABLE for place in self._places)]
        return ask_at(known, rows, [True] * len(rows), lambda some: self._engine.holds(self._found, some))


class Predicates:
    """Factory of the conditions of a source, with a cache of engines by table shape. Thread-safe."""

    def __init__(self, pool: Pool, odd: Callable[[], Collection[str]]) -> None:
        self._odd = odd
        self._engine: Callable[[Table], Engine] = functools.lru_cache(MAX_SHAPES)(lambda table: Engine(table, pool))

    def condition(self, table: Table, where: str) -> PostgresCondition:
        """Return the predicate `where` over rows of `table`, which may be a current or an earlier shape."""
        return PostgresCondition(self._engine(table), where, self._odd())


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
