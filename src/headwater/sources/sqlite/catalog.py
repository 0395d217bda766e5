"""Table shapes of a file as one connection sees them, reloaded only after a schema change."""

from __future__ import annotations

import apsw
import msgspec

from headwater.errors import NotFound
from headwater.model.table import Row, Table
from headwater.sources.sqlite.capture.change_decoder import row_decoder
from headwater.sources.sqlite.capture.trigger_installation import read_kinds, read_layouts
from headwater.sources.sqlite.capture.trigger_plan import Layout
from headwater.sources.sqlite.capture.triggers import END, TABLES
from headwater.sources.sqlite.connection import OURS
from headwater.sources.sqlite.query.authorizer import OUR_TRIGGER, Answer, Guard
from headwater.sources.sqlite.schema.table_shapes import Shape, read_shape, table_names
from headwater.sources.sqlite.sql import insert_into
from headwater.sources.sqlite.types import kind_of


class Catalog:
    """Cached table shapes of one connection; not for concurrent use by several threads."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._version = -1
        self._held = False
        self.layouts: dict[int, Layout] = {}
        self._shapes: dict[str, Shape] = {}
        self._inserts: dict[tuple[str, tuple[str, ...], bool], str] = {}

    def hold(self) -> None:
        """Refresh now and not again: inside a write transaction only we change the schema, and then call `refresh`."""
        self.refresh()
        self._held = True

    def refresh_unless_held(self) -> None:
        """Reload the shapes if the schema changed, unless `hold` was called."""
        if not self._held:
            self.refresh()

    def refresh(self) -> None:
        """Reload the shapes if the schema changed."""
        ((version,),) = self._guard.run("PRAGMA schema_version").fetchall()
        if version == self._version:
            return
        self._guard.forget()
        with self._guard.own() as db:
            kinds, self.layouts = read_kinds(db), read_layouts(db)
            shapes = {name: read_shape(db, name, kinds.get(name)) for name in table_names(db)}
        for layout in self.layouts.values():  # captured tables have the version of their layout
            name = layout.table.name
            if layout.active and name in shapes:
                table = msgspec.structs.replace(shapes[name].table, version=layout.table.version)
                shapes[name] = msgspec.structs.replace(shapes[name], table=table)
        self._shapes, self._version = shapes, int(str(version))
        self._inserts.clear()

    def shape(self, name: str) -> Shape:
        """Return the shape of table `name`, or raise NotFound, which names no other table: a caller may be scoped."""
        self.refresh_unless_held()
        if (shape := self._shapes.get(name)) is None:
            raise NotFound(f"there is no table {name!r}", hint="See schema.list_tables.")
        return shape

    def insert_text(self, table: Table, names: tuple[str, ...], returning: bool) -> str:
        """Return the INSERT of one row with the columns `names`, cached."""
        found = self._inserts.get((table.name, names, returning))
        if found is None:
            if len(self._inserts) >= 1_000:
                self._inserts.clear()
            found = self._inserts[table.name, names, returning] = insert_into(table, names, returning)
        return found

    def kind(self, answer: Answer) -> str:
        """Return the kind of a result column: that of its table's column if known, else of its declared type."""
        shape = self._shapes.get(answer.table or "")
        place = shape.table.index.get(answer.column or "") if shape else None
        if shape is not None and place is not None:
            return shape.table.columns[place].kind
        return kind_of(answer.declared or "")

    def tables(self) -> dict[str, Table]:
        """Return every table of the user by name."""
        self.refresh_unless_held()
        return {name: shape.table for name, shape in self._shapes.items()}

    def decode(self, shape: Shape, stored: list[tuple[object, ...]]) -> list[Row]:
        """Return the stored rows of a table as values."""
        decode = row_decoder(Layout(0, shape))
        return [decode(row) for row in stored]


def intruders(db: apsw.Connection) -> set[str]:
    """Return the names of objects that have or mention our prefix and are not ours."""
    found = db.execute(
        "SELECT type, name, tbl_name FROM sqlite_schema WHERE instr(lower(name || coalesce(sql, '')), ?)", (OURS,)
    )
    return {name for kind, name, table in found if not _is_ours(kind, name, table)}


def _is_ours(kind: str, name: str, table: str) -> bool:
    return bool(OUR_TRIGGER.fullmatch(name)) if kind == "trigger" else table in (*TABLES, END)
