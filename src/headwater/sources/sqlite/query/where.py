"""`where` conditions: SQL predicates on rows of the log, true exactly where SQLite evaluates them to true.

Python evaluates the parts with the same meaning in Python and SQLite; SQLite evaluates the rest, on the rows left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from headwater.errors import InvalidRequest
from headwater.model.table import Key, Row, Table
from headwater.sources.python_predicate import Unknown, ask_at, narrowest_pin
from headwater.sources.request_checks import check_predicate
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.predicate_engine import Engine
from headwater.sources.sqlite.query.predicate_python import Program, read

MAX_SHAPES = 64  # cached engines, one per table shape; each condition keeps its own engine


class SqliteCondition:
    """A predicate on rows of one table shape. Fulfils `Condition`."""

    def __init__(self, engine: Engine, where: str) -> None:
        self._engine, self._where = engine, where
        self._columns = engine.examine(where)
        program = self._program = _program(engine, where)
        self.pin = None if program is None else narrowest_pin(program.parts, lambda name: order(engine.table, [name]))
        # The event loop evaluates cheap conditions: it must never wait for the engine's lock, which other threads hold.
        self.is_cheap: bool = (
            program is not None and program.check is not None and program.is_whole and program.is_exact
        )
        self.calls: tuple[str, ...] = ()

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether the condition is true; InvalidRequest if it fails on a row."""
        program = self._program
        if program is None or program.check is None:
            return self._ask(rows)
        try:
            found = program.check(rows)
        except Unknown:
            return self._ask(rows)
        if program.is_whole:
            return found
        return ask_at([place for place, holds in enumerate(found) if holds], rows, found, self._ask)

    def _ask(self, rows: Sequence[Row]) -> list[bool]:
        return self._engine.holds(self._where, self._columns, rows)


class Predicates:
    """Factory of conditions and converter of values to their stored form. One per source; thread-safe."""

    def __init__(self) -> None:
        self._engine: Callable[[Table], Engine] = functools.lru_cache(MAX_SHAPES)(Engine)

    def condition(self, table: Table, where: str) -> SqliteCondition:
        """Return the predicate `where` over rows of `table`; see Reader."""
        _check_text(where)
        return SqliteCondition(self._engine(table), where)

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as `columns` of `table` would hold them; see Readable."""
        return self._engine(table).stored(columns, values)


def _check_text(where: str) -> None:
    check_predicate(where)
    try:
        where.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the predicate holds lone surrogates", hint="Send the predicate as UTF-8.") from None


def _program(engine: Engine, where: str) -> Program | None:
    """Return the Python program of `where`, if SQLite confirms that it was parsed correctly."""
    program = read(engine, where)
    if program is None or not program.parts:
        return None
    theirs = engine.explain(where)
    return program if theirs is not None and theirs == engine.explain(program.sql) else None
