"""`where` conditions: SQL predicates on rows of the log, true exactly where SQLite evaluates them to true.

Python evaluates the parts with the same meaning in Python and SQLite; SQLite evaluates the rest, on the rows left.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from headwater.errors import InvalidRequest
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Pin
from headwater.sources.request_checks import check_predicate
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.predicate_engine import Engine
from headwater.sources.sqlite.query.predicate_python import Program, Unknown, read

MAX_SHAPES = 64  # cached engines, one per table shape; each condition keeps its own engine


class SqliteCondition:
    """Implementation of `Condition`."""

    def __init__(self, engine: Engine, where: str) -> None:
        self._engine, self._where = engine, where
        self._columns = engine.examine(where)
        self._program = _program(engine, where)
        self.pin = None if self._program is None else _pin(engine.table, self._program)
        # The event loop evaluates cheap conditions: it must never wait for the engine's lock, which other threads hold.
        program = self._program
        self.is_cheap: bool = (
            program is not None and program.check is not None and program.is_whole and program.is_exact
        )
        self.calls: tuple[str, ...] = ()

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether the condition is true."""
        program = self._program
        if program is None or program.check is None:
            return self._ask(rows)
        try:
            found = program.check(rows)
        except Unknown:
            return self._ask(rows)
        return found if program.is_whole else self._narrowed(rows, found)

    def _narrowed(self, rows: Sequence[Row], found: list[bool]) -> list[bool]:
        left = [place for place, holds in enumerate(found) if holds]
        for place, holds in zip(left, self._ask([rows[place] for place in left]), strict=True):
            found[place] = holds
        return found

    def _ask(self, rows: Sequence[Row]) -> list[bool]:
        return self._engine.holds(self._where, self._columns, rows)


class Predicates:
    """Factory of conditions and converter of values to their stored form. One per source; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _engines
        self._engines: dict[Table, Engine] = {}

    def condition(self, table: Table, where: str) -> SqliteCondition:
        """Return the predicate `where` over rows of `table`; see Source."""
        _check_text(where)
        return SqliteCondition(self._engine(table), where)

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as `columns` of `table` would hold them; see Source."""
        return self._engine(table).stored(columns, values)

    def _engine(self, table: Table) -> Engine:
        with self._lock:
            found = self._engines.get(table)
            if found is None:
                if len(self._engines) >= MAX_SHAPES:
                    self._engines.clear()
                found = self._engines[table] = Engine(table)
            return found


def _check_text(where: str) -> None:
    check_predicate(where)
    try:
        where.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the predicate holds lone surrogates", hint="Send it as UTF-8.") from None


def _program(engine: Engine, where: str) -> Program | None:
    """Return the Python program of `where`, if SQLite confirms that it was parsed correctly."""
    program = read(engine, where)
    if program is None or not program.parts:
        return None
    theirs = engine.explain(where)
    return program if theirs is not None and theirs == engine.explain(program.sql) else None


def _pin(table: Table, program: Program) -> Pin | None:
    pins = [part for part in program.parts if part.column is not None]
    best = min(pins, key=lambda part: len(part.values), default=None)
    if best is None or best.column is None:
        return None
    place = order(table, [best.column])
    return Pin(best.column, frozenset(place((value,)) for value in best.values))
