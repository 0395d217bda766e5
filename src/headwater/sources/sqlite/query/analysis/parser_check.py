"""Check of the parser by the engine: the rendered text must give the same program and name everything that is read."""

from __future__ import annotations

from headwater.errors import HeadwaterError
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.analysis.authorizer_reads import StatementFacts, is_program_of, program_of
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, folded
from headwater.sources.sqlite.query.syntax.name_resolution import Names
from headwater.sources.sqlite.query.syntax.render import render


def verify(reader: GuardedConnection, query: tree.Query, names: Names, facts: StatementFacts) -> None:
    """Raise NotAnalysed if the engine understood the statement differently from our parser."""
    try:
        if not is_program_of(reader, render(query), facts.program):
            raise NotAnalysed("SQLite compiles our reading of the statement to another program")
        for view in names.views.values():
            if not is_program_of(reader, render(view.query), program_of(reader, view.text)):
                raise NotAnalysed("SQLite compiles our reading of a view to another program")
    except HeadwaterError as error:
        raise NotAnalysed(f"SQLite does not accept our reading of the statement: {error.message}") from None
    hidden = set(names.views) - {folded(name) for name in facts.views}
    if hidden:
        raise NotAnalysed(f"SQLite does not look into the view {min(hidden)}")
    unread = set(facts.tables) - {table for table, _ in names.read}
    if unread:
        raise NotAnalysed(f"SQLite opens {min(unread)}, which was not found in the statement")
    missing = {_known(reader, *read) for read in facts.columns} - names.read
    if missing:
        table, column = min(missing)
        raise NotAnalysed(f"SQLite reads {table}.{column or '*'}, which was not found in the statement")
    if facts.foreign:
        raise NotAnalysed(f"SQLite reads {min(facts.foreign)!r}")


def _known(reader: GuardedConnection, table: str, column: str) -> tuple[str, str]:
    """Return a column by its name in the table: the engine reports ROWID for an identity without a name."""
    shape = reader.catalog.shape(table).table
    if column == "ROWID" and column not in shape.index:
        key = next((c.name for c in shape.columns if c.auto or c.hidden), column)
        return table, key
    return table, column


def real(reader: GuardedConnection, text: str) -> float:
    """Return a number as SQLite parses it: its floats may differ from Python's in the last bit."""
    with reader.guard.own() as db:
        ((value,),) = db.cursor().execute(f"SELECT {text}", can_cache=False).fetchall()
        return float(str(value)) if not isinstance(value, float) else value
