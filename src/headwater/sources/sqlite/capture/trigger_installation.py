"""Installation of capture in a SQLite file, its adaptation to schema changes, and its removal.

All functions run inside a write transaction of the caller.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection

import apsw
import msgspec

from headwater.errors import SourceUnfit
from headwater.model.change import Op
from headwater.model.table import Table
from headwater.sources.sqlite.capture.trigger_plan import (
    Add,
    Drop,
    Layout,
    Renew,
    Reshape,
    SchemaObject,
    Step,
    Trigger,
    plan,
    visible_statements,
)
from headwater.sources.sqlite.capture.triggers import (
    ANCHOR,
    CANARY,
    CAPTURE,
    CELL_INDEXES,
    END,
    LAYOUT,
    MAX_COLUMNS,
    MAX_STEPS,
    META,
    STASH,
    TABLES,
    TXN,
    create_cell_tables,
    create_tables,
    create_triggers,
    trigger_prefix,
    widen,
)
from headwater.sources.sqlite.connection import OURS, ident
from headwater.sources.sqlite.schema import view_definitions
from headwater.sources.sqlite.schema.table_shapes import (
    Shape,
    key_compares_as_columns_do,
    read_shape,
    table_names,
    virtual_names,
)

FORMAT = "1"  # format of our tables in the user's file
UNDONE = "-- a schema change was made and undone unseen"
REBUILD = 16  # above this number of columns to add, re-creating our tables is cheaper


def is_installed(db: apsw.Connection) -> bool:
    """Return whether the file holds our tables."""
    return bool(list(db.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (CAPTURE,))))


def install(db: apsw.Connection, *, seq: int) -> None:
    """Create our tables; the next change gets offset `seq + 1`."""
    for statement in create_tables(2):
        db.execute(statement)
    set_meta(db, "format", FORMAT)
    anchor(db, seq)


def install_new_history(db: apsw.Connection, *, seq: int, **values: str) -> int:
    """Replace our tables by those of a new history with meta `values`; return the offset before its first change."""
    kept: dict[str, str] = {}
    if is_installed(db):
        kept = {name: meta(db, name) for name in ("kinds", "journal_mode_before")}
        seq = max(seq, newest(db) + 1)
    uninstall(db)
    install(db, seq=seq)
    for name, value in {**values, **kept}.items():
        set_meta(db, name, value)
    return seq


def newest(db: apsw.Connection) -> int:
    """Return the newest offset in use; 0 if there is none."""
    return int(db.execute(f"SELECT coalesce(max(seq), 0) FROM {CAPTURE}").get)


def anchor(db: apsw.Connection, seq: int) -> None:
    """Make `seq` the newest offset in use: the next change gets `seq + 1`."""
    db.execute(f"INSERT INTO {CAPTURE}(seq, op) VALUES (?, {ANCHOR})", (seq,))


def uninstall(db: apsw.Connection) -> None:
    """Remove every trigger, view and table of ours."""
    for trigger in read_triggers(db):
        if trigger.is_ours:
            db.execute(f"DROP TRIGGER {ident(trigger.name)}")
    db.execute(f"DROP VIEW IF EXISTS {END}")
    for name in TABLES:
        db.execute(f"DROP TABLE IF EXISTS {name}")


def check_format(db: apsw.Connection) -> None:
    """Raise SourceUnfit if our tables have a format that this version does not support."""
    if (found := meta(db, "format")) != FORMAT:
        raise SourceUnfit(
            f"the capture tables have format {found!r}; this version knows {FORMAT!r}",
            hint="Use the Headwater version that created them, or first detach the file with that version.",
        )


def add_columns(db: apsw.Connection) -> None:
    """Add columns that tables of an older version lack; that version can still use the tables."""
    if not list(db.execute("SELECT 1 FROM temp.pragma_table_info(?) WHERE name = 'us'", (TXN,))):
        db.execute(f"ALTER TABLE {TXN} ADD COLUMN us INTEGER")
    if not list(db.execute("SELECT 1 FROM temp.pragma_table_info(?) WHERE name = 'updated'", (STASH,))):
        db.execute(f"ALTER TABLE {STASH} ADD COLUMN updated")


def meta(db: apsw.Connection, name: str) -> str:
    """Return one of our small texts in the user's file; "" if unset."""
    found = list(db.execute(f"SELECT value FROM {META} WHERE name = ?", (name,)))
    return str(found[0][0]) if found else ""


def set_meta(db: apsw.Connection, name: str, value: str) -> None:
    """Store a small text in the user's file."""
    db.execute(f"INSERT OR REPLACE INTO {META} VALUES (?, ?)", (name, value))


def read_kinds(db: apsw.Connection) -> dict[str, dict[str, str]]:
    """Return table to column to kind, for kinds that the declared type alone would lose (a numbered u64 key)."""
    text = meta(db, "kinds") if is_installed(db) else ""
    return msgspec.json.decode(text, type=dict[str, dict[str, str]]) if text else {}


def read_layouts(db: apsw.Connection) -> dict[int, Layout]:
    """Return every layout that capture rows may still refer to."""
    rows = db.execute(f"SELECT id, active, shape, places FROM {LAYOUT} ORDER BY id")
    return {row[0]: _layout(*row) for row in rows}


@functools.lru_cache(maxsize=4096)  # every schema change reads all layouts several times
def _layout(number: int, active: int, shape: str, places: str | None) -> Layout:
    triggers = msgspec.json.decode(places, type=dict[str, int]) if places else {}
    return Layout(number, msgspec.json.decode(shape, type=Shape), bool(active), triggers)


def read_triggers(db: apsw.Connection) -> list[Trigger]:
    """Return all triggers of the file, oldest first."""
    rows = db.execute("SELECT name, tbl_name, sql, rowid FROM sqlite_schema WHERE type = 'trigger' ORDER BY rowid")
    return [Trigger(*row) for row in rows]


def read_parents(db: apsw.Connection) -> set[str]:
    """Return the tables, in lower case, whose changes cause actions of foreign keys."""
    rows = db.execute(
        'SELECT DISTINCT lower(k."table") FROM sqlite_schema AS s, temp.pragma_foreign_key_list(s.name) AS k'
        " WHERE s.type = 'table' AND NOT (k.on_update IN (?1, ?2) AND k.on_delete IN (?1, ?2))",
        ("NO ACTION", "RESTRICT"),
    )
    return {name for (name,) in rows}


def may_nest(db: apsw.Connection) -> bool:
    """Return whether a user's trigger or a foreign key may write rows inside a captured statement."""
    return any(not trigger.is_ours for trigger in read_triggers(db)) or bool(read_parents(db))


def capturable(db: apsw.Connection, wanted: Collection[str]) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the shapes of the `wanted` tables (all, if empty), and per other table why it cannot be captured."""
    shapes = {}
    refused = {name: "it is a virtual table" for name in virtual_names(db) if not wanted or name in wanted}
    kinds = read_kinds(db)
    for name in table_names(db):
        if wanted and name not in wanted:
            continue
        shape = read_shape(db, name, kinds.get(name))
        if len(shape.table.columns) > MAX_COLUMNS:
            refused[name] = f"it has {len(shape.table.columns)} columns; at most {MAX_COLUMNS} can be captured"
        elif not shape.table.key:
            refused[name] = "it has no primary key and its columns hide every name of the rowid"
        elif shape.numbered and len(shape.numbered.generated) > MAX_STEPS:
            refused[name] = (
                "a UNIQUE rule is computed from its INTEGER PRIMARY KEY through more than "
                f"{MAX_STEPS} generated columns"
            )
        elif not key_compares_as_columns_do(db, shape.table):
            refused[name] = "its primary key has another collation than its columns"
        else:
            shapes[name] = shape
    return shapes, refused


def reconcile(
    db: apsw.Connection, wanted: Collection[str], *, known_good: int, ddl: str = "", first: bool = False
) -> list[Step]:
    """Adapt capture to the schema, and report the differences as `schema_change` rows; return the steps taken.

    `known_good` is an offset at which the old schema was still current: later changes may have been captured in
    the old form. `ddl` is set if we ran it in this very transaction: then no change can have been missed.
    `first` is the first attach, which is not reported to readers.
    """
    shapes, _ = capturable(db, wanted)
    active = [layout for layout in read_layouts(db).values() if layout.active]
    vacuumed = renumbered(db)
    doubtful = [] if ddl or vacuumed or not _is_undone(db) else active
    doubtful = [layout for layout in doubtful if _captured_since(db, layout.id, known_good)]
    steps = plan(shapes, active, read_triggers(db), parents=read_parents(db), vacuumed=vacuumed)
    for step in steps:
        _apply(db, step, known_good=known_good, ddl=ddl, first=first)
    if steps or vacuumed:
        _note_places(db)
    if vacuumed:
        for layout in read_layouts(db).values():
            if layout.active and not layout.table.primary_key:
                _announce(db, layout.id, ddl or "VACUUM", resnapshot=True)
        db.execute(f"UPDATE {CANARY} SET rowid = 2")
    for layout in doubtful:
        if read_layouts(db)[layout.id].active:
            _announce(db, layout.id, UNDONE, resnapshot=True)
    _reconcile_views(db, ddl)
    _note_schema(db)
    return steps


def _is_undone(db: apsw.Connection) -> bool:
    """Return whether other programs changed the schema more often than it shows. Capture did not know a UNIQUE index
    or a trigger that was dropped again, so changes that it caused may be missing or out of order."""
    if not (note := meta(db, "schema")):
        return False
    version, before = msgspec.json.decode(note, type=tuple[int, dict[str, SchemaObject]])
    return int(db.execute("PRAGMA schema_version").get) - version > visible_statements(before, _read_objects(db))


def _note_schema(db: apsw.Connection) -> None:
    """Record the schema, for `_is_undone`."""
    now = msgspec.json.encode((db.execute("PRAGMA schema_version").get, _read_objects(db))).decode()
    if now != meta(db, "schema"):
        set_meta(db, "schema", now)


def _read_objects(db: apsw.Connection) -> dict[str, SchemaObject]:
    """Return the objects of other programs as `visible_statements` takes them."""
    rows = db.execute(
        "SELECT type || ' ' || name, rowid, sql FROM sqlite_schema WHERE sql IS NOT NULL AND ?1 NOT IN "
        "(substr(name, 1, length(?1)), substr(tbl_name, 1, length(?1)))",
        (OURS,),
    )
    return {
        name: (rowid, sql.count(","), hashlib.blake2b(sql.encode(), digest_size=6).hexdigest())
        for name, rowid, sql in rows
    }


def _reconcile_views(db: apsw.Connection, ddl: str) -> None:
    """Report each changed view to the readers of its tables: their queries may now mean something else."""
    rows = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'view' AND name <> ?", (END,))
    before, now = view_definitions.parse(meta(db, "views")), dict(rows)
    layouts = {layout.table.name: layout.id for layout in read_layouts(db).values() if layout.active}
    for name in view_definitions.moved(before, now):
        for table in sorted(
            view_definitions.read_by(name, before, layouts) | view_definitions.read_by(name, now, layouts)
        ):
            _announce(db, layouts[table], ddl or now.get(name) or f"DROP VIEW {ident(name)}", resnapshot=False)
    kept = view_definitions.remembered(before, now)
    if kept != before:
        set_meta(db, "views", msgspec.json.encode(kept).decode())


def _note_places(db: apsw.Connection) -> None:
    """Record the rowids of our triggers in the schema: a re-created trigger gets another rowid.

    The view END follows the triggers; otherwise the last trigger would get its old rowid again when re-created.
    """
    db.execute(f"DROP VIEW IF EXISTS {END}")
    db.execute(f"CREATE VIEW {END} AS SELECT 'last of the schema'")
    places: dict[str, dict[str, int]] = {}  # by the number of the layout, which is in the trigger's name
    for trigger in read_triggers(db):
        if trigger.is_ours:
            number = trigger.name.removeprefix(OURS).partition("_")[0]
            places.setdefault(number, {})[trigger.name] = trigger.place
    for layout in read_layouts(db).values():
        now = places.get(str(layout.id), {})
        if now != layout.places:
            db.execute(f"UPDATE {LAYOUT} SET places = ? WHERE id = ?", (msgspec.json.encode(now).decode(), layout.id))


def renumbered(db: apsw.Connection) -> bool:
    """Return whether a VACUUM renumbered the rows of tables without a key."""
    return not list(db.execute(f"SELECT 1 FROM {CANARY} WHERE rowid = 2"))


def _apply(db: apsw.Connection, step: Step, *, known_good: int, ddl: str, first: bool) -> None:
    match step:
        case Add(shape, nests):
            layout = _new_layout(db, shape, nests)
            if not first:
                _announce(db, layout, ddl or _sql_of(db, shape.table.name), resnapshot=_has_rows(db, shape))
        case Reshape(old, shape, nests, unseen):
            late = not ddl and (unseen or _captured_since(db, old.id, known_good))
            # One statement that adds no column may rename one.
            grown = not ddl or len(shape.table.columns) > len(old.table.columns)
            filled = grown and _fills_rows(db, old.table, shape)
            remove_triggers(db, old.id)
            _retire(db, old.id)
            layout = _new_layout(db, shape, nests, version=old.table.version + 1)
            _announce(db, layout, ddl or _sql_of(db, shape.table.name), resnapshot=late or filled)
        case Renew(layout_, nests, unseen, overtaken):
            late = unseen or (overtaken and _captured_since(db, layout_.id, known_good))
            remove_triggers(db, layout_.id)
            _create(db, layout_.shape, layout_.id, nests)
            if late and not ddl:
                _announce(db, layout_.id, _sql_of(db, layout_.table.name), resnapshot=True)
        case Drop(layout_, went):
            remove_triggers(db, layout_.id)
            _retire(db, layout_.id)
            name = ident(layout_.table.name)
            done = f"ALTER TABLE {name} RENAME TO {ident(went)}" if went else f"DROP TABLE {name}"
            is_kept = not went and layout_.table.name in table_names(db)  # it can no longer be captured
            _announce(db, layout_.id, done if is_kept else ddl or done, resnapshot=False)


def remove_triggers(db: apsw.Connection, layout: int) -> None:
    """Drop all triggers of the layout with number `layout`."""
    prefix = trigger_prefix(layout)
    for trigger in read_triggers(db):
        if trigger.name.startswith(prefix):
            db.execute(f"DROP TRIGGER {ident(trigger.name)}")


def _new_layout(db: apsw.Connection, shape: Shape, nests: bool, version: int = 0) -> int:
    name = shape.table.name
    if not version:
        (last,) = next(db.execute(f"SELECT coalesce(max(version), 0) FROM {LAYOUT} WHERE name = ?", (name,)))
        version = last + 1
    shape = msgspec.structs.replace(shape, table=msgspec.structs.replace(shape.table, version=version))
    db.execute(
        f"INSERT INTO {LAYOUT}(name, version, active, shape) VALUES (?, ?, 1, ?)",
        (name, version, msgspec.json.encode(shape).decode()),
    )
    layout = db.last_insert_rowid()
    _fit_width(db, len(shape.table.columns))
    _create(db, shape, layout, nests)
    return layout


def _create(db: apsw.Connection, shape: Shape, layout: int, nests: bool) -> None:
    for statement in create_triggers(shape, layout, nests=nests).values():
        db.execute(statement)


def _retire(db: apsw.Connection, layout: int) -> None:
    db.execute(f"UPDATE {LAYOUT} SET active = 0 WHERE id = ?", (layout,))


def capture_cells(db: apsw.Connection) -> int:
    """Return how many value columns the capture table has."""
    (columns,) = next(db.execute("SELECT count(*) FROM temp.pragma_table_info(?)", (CAPTURE,)))
    return int(columns) - 3


def _fit_width(db: apsw.Connection, width: int) -> None:
    have = capture_cells(db) // 2
    if width - have > REBUILD:  # SQLite reads the whole schema again after each ALTER
        _rebuild(db, width)
    else:
        for statement in widen(have, width):
            db.execute(statement)


def _rebuild(db: apsw.Connection, width: int) -> None:
    """Re-create the tables that hold cells with more columns, and keep their rows."""
    for name, statement in create_cell_tables(width).items():
        kept = f"{name}_kept"
        columns = [column for (column,) in db.execute("SELECT name FROM temp.pragma_table_info(?)", (name,))]
        db.execute(f"CREATE TEMP TABLE {kept} AS SELECT * FROM {name}")
        db.execute(f"DROP TABLE {name}")
        db.execute(statement)
        db.execute(f"INSERT INTO {name}({', '.join(columns)}) SELECT * FROM temp.{kept}")
        db.execute(f"DROP TABLE temp.{kept}")
    for statement in CELL_INDEXES:
        db.execute(statement)


def _announce(db: apsw.Connection, layout: int, ddl: str, *, resnapshot: bool) -> None:
    db.execute(
        f"INSERT INTO {CAPTURE}(t, op, c0, c1) VALUES (?, {Op.SCHEMA_CHANGE:d}, ?, ?)",
        (layout, ddl, int(resnapshot)),
    )


def demand_resnapshot(db: apsw.Connection, tables: Collection[str]) -> None:
    """Demand a new snapshot of `tables` from readers: captured changes may be incomplete or out of order."""
    for layout in read_layouts(db).values():
        if layout.active and layout.table.name in tables:
            _announce(db, layout.id, "-- images of a key do not chain", resnapshot=True)


def _captured_since(db: apsw.Connection, layout: int, after: int) -> bool:
    return bool(list(db.execute(f"SELECT 1 FROM {CAPTURE} WHERE seq > ? AND t = ? LIMIT 1", (after, layout))))


def _fills_rows(db: apsw.Connection, old: Table, shape: Shape) -> bool:
    """Return whether existing rows have values in columns that `old` lacks, which no change contains."""
    rows = db.execute(
        "SELECT name FROM temp.pragma_table_xinfo(?) WHERE hidden IN (2, 3) OR upper(dflt_value) <> 'NULL'",
        (shape.table.name,),
    )
    return any(name not in old.names for (name,) in list(rows)) and _has_rows(db, shape)


def _has_rows(db: apsw.Connection, shape: Shape) -> bool:
    return bool(list(db.execute(f"SELECT 1 FROM {ident(shape.table.name)} LIMIT 1")))


def _sql_of(db: apsw.Connection, name: str) -> str:
    found = db.execute("SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (name,))
    return next((sql for (sql,) in found), "")
