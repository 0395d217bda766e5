"""Plan of the steps after which every wanted table is captured as the schema now defines it. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from headwater.model.table import Table
from headwater.sources.sqlite.capture.triggers import create_triggers
from headwater.sources.sqlite.connection import OURS
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, folded, tokens
from headwater.sources.sqlite.schema.table_shapes import Shape


class Layout(msgspec.Struct, frozen=True):
    """One numbered form of a table's rows in the capture table."""

    id: int
    shape: Shape
    active: bool = True
    places: dict[str, int] = {}  # trigger name to its rowid in sqlite_schema when we last created it

    @property
    def table(self) -> Table:
        """Return the table as the model describes it."""
        return self.shape.table


class Trigger(msgspec.Struct, frozen=True):
    """A trigger as sqlite_schema lists it; `place` is its rowid there, highest for the newest trigger."""

    name: str
    table: str  # as CREATE TRIGGER spells the name: the table's own name may have other capitals
    sql: str
    place: int

    @property
    def is_ours(self) -> bool:
        """Return whether Headwater created this trigger."""
        return self.name.startswith(OURS)


class Add(msgspec.Struct, frozen=True):
    """A table that is not captured yet. `nests`, here and below: see `create_triggers`."""

    shape: Shape
    nests: bool


class Reshape(msgspec.Struct, frozen=True):
    """A captured table with changed columns or keys. `unseen`: rows may have been written without triggers."""

    layout: Layout
    shape: Shape
    nests: bool
    unseen: bool


class Renew(msgspec.Struct, frozen=True):
    """An unchanged table whose triggers are missing, changed, or older than a trigger of the user."""

    layout: Layout
    nests: bool
    unseen: bool
    overtaken: bool = False  # changes may be captured wrongly: a user's trigger fired first, or wrote in between


class Drop(msgspec.Struct, frozen=True):
    """A captured table that was dropped, renamed (to `went`), or is no longer wanted."""

    layout: Layout
    went: str = ""


Step = Add | Reshape | Renew | Drop


def plan(
    shapes: Mapping[str, Shape],
    layouts: Sequence[Layout],
    triggers: Sequence[Trigger],
    *,
    parents: Collection[str],
    vacuumed: bool = False,
) -> list[Step]:
    """Return the steps that lead from the installed `layouts` and `triggers` to capture of `shapes`.

    `parents`: the tables whose changes cause actions of foreign keys, in lower case.
    `vacuumed`: VACUUM rewrote the schema, so trigger rowids prove nothing.
    """
    gone: list[Step] = []
    steps: list[Step] = []
    claimed: set[str] = set()
    by_name = {trigger.name: trigger for trigger in triggers}
    by_table: dict[str, list[Trigger]] = {}
    for trigger in triggers:
        by_table.setdefault(folded(trigger.table), []).append(trigger)

    def nests(table: str) -> bool:
        return folded(table) in parents or _has_before_triggers(by_table.get(folded(table), ()))

    for layout in layouts:
        on_table = by_table.get(folded(layout.table.name), ())
        nesting = nests(layout.table.name)
        expected = create_triggers(layout.shape, layout.id, nests=nesting)
        present = [by_name[name] for name in expected if name in by_name]
        # RENAME TABLE keeps the triggers. Readers of either name see a drop and a new table.
        name = present[0].table if present else layout.table.name
        shape = shapes.get(layout.table.name)
        if shape is None or folded(name) != folded(layout.table.name):
            gone.append(Drop(layout, name if name != layout.table.name else ""))
            continue
        claimed.add(layout.table.name)
        unseen = len(present) < len(expected) or (not vacuumed and _made_again(layout, present))
        overtaken = bool(present) and _overtaken(present, on_table, expected)
        texts = [trigger.sql for trigger in present]
        begins_to_nest = nesting and texts == [*create_triggers(layout.shape, layout.id, nests=False).values()]
        if _bare(layout.shape) != _bare(shape):
            steps.append(Reshape(layout, shape, nesting, unseen or overtaken or vacuumed))
        elif unseen or overtaken or texts != [*expected.values()]:
            steps.append(Renew(layout, nesting, unseen, overtaken or begins_to_nest))
    return gone + steps + [Add(shape, nests(name)) for name, shape in sorted(shapes.items()) if name not in claimed]


SchemaObject = tuple[int, int, str]


def visible_statements(before: Mapping[str, SchemaObject], now: Mapping[str, SchemaObject]) -> int:
    """Return how many schema changes can explain the difference between two schemas; more have left no trace.

    The keys are type and name of each object, the values its rowid in sqlite_schema, the number of commas in its text,
    and a digest of the text.
    """
    found = len(before.keys() ^ now.keys())
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            (rowid, commas, _), (had_rowid, had_commas, _) = now[name], before[name]
            # A rebuilt table was renamed, too; columns are added one by one.
            found += 3 if rowid != had_rowid and name.startswith("table ") else max(2, abs(commas - had_commas))
    return found


def _made_again(layout: Layout, present: Sequence[Trigger]) -> bool:
    """Return whether others re-created our triggers, as in SQLite's recipe for rebuilding a table."""
    return any(layout.places.get(trigger.name) != trigger.place for trigger in present)


def _has_before_triggers(triggers: Sequence[Trigger]) -> bool:
    """Return whether one of a table's triggers is a BEFORE trigger (the default) of the user."""
    return any(not _is_after(trigger.sql) for trigger in triggers if not trigger.is_ours)


def _is_after(sql: str) -> bool:
    """Return whether AFTER follows the name in a CREATE TRIGGER text; False for a text that we cannot read."""
    try:
        words = [token.word for token in tokens(sql)]  # "" for a quoted name
        words = words[words.index("TRIGGER") + 1 :]
    except (NotAnalysed, ValueError):
        return False
    if words[:3] == ["IF", "NOT", "EXISTS"]:
        words = words[3:]
    if words[1:2] == ["."]:  # the first name is that of the schema
        words = words[2:]
    return words[1:2] == ["AFTER"]


def _bare(shape: Shape) -> Shape:
    return msgspec.structs.replace(shape, table=msgspec.structs.replace(shape.table, version=0))


def _overtaken(present: Sequence[Trigger], triggers: Sequence[Trigger], ours: Mapping[str, str]) -> bool:
    """Return whether one of a table's other triggers is newer than ours: SQLite would fire that trigger first."""
    oldest = min(trigger.place for trigger in present)
    return any(trigger.place > oldest for trigger in triggers if trigger.name not in ours)
