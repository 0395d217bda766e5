"""What must be done so that every wanted table is captured as it is now: a pure decision over the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headwater.model.table import Table
from headwater.sources.sqlite.capture.triggers import create_triggers
from headwater.sources.sqlite.connection import OURS
from headwater.sources.sqlite.schema.table_shapes import Shape, mask


class Layout(msgspec.Struct, frozen=True):
    """One numbered form in which a table's rows stand in the capture table."""

    id: int
    shape: Shape
    active: bool = True
    places: dict[str, int] = {}  # trigger to its rowid in sqlite_schema, as we left it

    @property
    def table(self) -> Table:
        """The table's shape in the words of the model."""
        return self.shape.table


class Trigger(msgspec.Struct, frozen=True):
    """A trigger as sqlite_schema has it; `place` grows with its age's inverse: the newest has the largest."""

    name: str
    table: str
    sql: str
    place: int

    @property
    def is_ours(self) -> bool:
        """Whether we made it."""
        return self.name.startswith(OURS)


class Add(msgspec.Struct, frozen=True):
    """A table not captured yet."""

    shape: Shape


class Reshape(msgspec.Struct, frozen=True):
    """A captured table that changed its columns or keys. `unseen`: rows were written without triggers."""

    layout: Layout
    shape: Shape
    unseen: bool


class Renew(msgspec.Struct, frozen=True):
    """Triggers of an unchanged table that are no longer the last created, or not as we made them."""

    layout: Layout
    unseen: bool
    overtaken: bool = False  # a user's trigger fired before ours: what was captured since may be out of order


class Drop(msgspec.Struct, frozen=True):
    """A captured table that is gone, or no longer wanted. `went` is its new name, if it was renamed."""

    layout: Layout
    went: str = ""


Step = Add | Reshape | Renew | Drop


def plan(
    shapes: Mapping[str, Shape], layouts: Sequence[Layout], triggers: Sequence[Trigger], *, vacuumed: bool = False
) -> list[Step]:
    """The steps from what is installed (`layouts`, `triggers`) to what `shapes` asks for.

    `vacuumed`: the schema was written anew, so that places tell nothing.
    """
    gone: list[Step] = []
    steps: list[Step] = []
    claimed: set[str] = set()
    ours = {trigger.name: trigger for trigger in triggers}
    for layout in layouts:
        expected = create_triggers(layout.shape, layout.id, nests=nests(layout.table.name, triggers))
        present = [ours[name] for name in expected if name in ours]
        # RENAME TABLE takes the triggers along. To readers of either name that is a drop and a new table.
        name = present[0].table if present else layout.table.name
        shape = shapes.get(layout.table.name)
        if shape is None or name != layout.table.name:
            gone.append(Drop(layout, name if name != layout.table.name else ""))
            continue
        claimed.add(name)
        unseen = len(present) < len(expected) or (not vacuumed and _made_again(layout, present))
        overtaken = bool(present) and _overtaken(name, present, triggers, expected)
        if not _same(layout.shape, shape):
            steps.append(Reshape(layout, shape, unseen or overtaken or vacuumed))
        elif unseen or overtaken or [t.sql for t in present] != list(expected.values()):
            steps.append(Renew(layout, unseen, overtaken))
    return gone + steps + [Add(shape) for name, shape in sorted(shapes.items()) if name not in claimed]


def _made_again(layout: Layout, present: Sequence[Trigger]) -> bool:
    """Whether others dropped our triggers and created them again, as SQLite's recipe for rebuilding a table says."""
    return any(layout.places.get(trigger.name) != trigger.place for trigger in present)


def nests(table: str, triggers: Sequence[Trigger]) -> bool:
    """Whether a user's BEFORE trigger (the default) may write to the table between ours."""
    heads = [mask(t.sql).upper().split(" BEGIN")[0] for t in triggers if t.table == table and not t.is_ours]
    return any("BEFORE" in head or "AFTER" not in head for head in heads)


def _same(old: Shape, new: Shape) -> bool:
    return _bare(old) == _bare(new)


def _bare(shape: Shape) -> Shape:
    return msgspec.structs.replace(shape, table=msgspec.structs.replace(shape.table, version=0))


def _overtaken(name: str, present: list[Trigger], triggers: Sequence[Trigger], ours: Mapping[str, str]) -> bool:
    """Whether a user's trigger was created after ours: SQLite would fire it first."""
    oldest = min(trigger.place for trigger in present)
    return any(t.place > oldest for t in triggers if t.table == name and t.name not in ours)
