"""Definitions that queries depend on, besides rows: remembered, so that their changes are announced to feeds.

No row shows that a view was replaced, a partition attached or a type altered. So the catalogue is compared with its
state at the last check; a change is announced for every table that an affected query reads (see
unstreamed_changes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from headwater.sources.postgres.connection import Connection
from headwater.sources.postgres.schema.relations import table_name

NOTE = "postgres_meanings"
MOST_GONE = 1_000  # dropped names that are remembered, in case they are created again

# Relations lead to the relations they read: views by their rules, parents by their children. Types lead to their
# component types. An object identified by its writing transaction counts as changed even if it was changed back.
_SQL = """
WITH RECURSIVE relation AS (
  SELECT c.*, n.nspname, c.xmin::text::bigint AS written FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE c.oid >= 16384 AND c.relpersistence <> 't' AND c.relkind IN ('r', 'p', 'v')
), edge (reader, read) AS (
  SELECT r.ev_class, d.refobjid FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass
    AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> r.ev_class
  WHERE r.oid >= 16384 AND r.ev_type = '1'
  UNION SELECT inhparent, inhrelid FROM pg_inherits
), reach (root, oid) AS (
  SELECT oid, oid FROM relation UNION SELECT r.root, e.read FROM reach r JOIN edge e ON e.reader = r.oid
), typed (root, oid) AS (
  SELECT attrelid, atttypid FROM pg_attribute
  WHERE attrelid IN (SELECT oid FROM relation) AND attnum > 0 AND NOT attisdropped AND atttypid >= 16384
  UNION SELECT u.root, i.oid FROM typed u JOIN pg_type t ON t.oid = u.oid
  LEFT JOIN pg_range r ON t.oid IN (r.rngtypid, r.rngmultitypid) CROSS JOIN LATERAL (
    VALUES (t.typelem), (t.typbasetype), (r.rngsubtype)
    UNION ALL SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
      AND NOT a.attisdropped) i (oid)
  WHERE i.oid >= 16384
), word (type, mark, value) AS (
  SELECT enumtypid, 'labels ' || enumtypid,
    string_agg(lpad(to_hex(hashtext(oid || ' ' || enumlabel)), 8, '0'), '' ORDER BY oid)
  FROM pg_enum WHERE enumtypid >= 16384 GROUP BY enumtypid
  UNION ALL SELECT t.oid, 'type ' || t.oid, string_agg(a.attnum || ' ' || a.atttypid, ',' ORDER BY a.attnum)
  FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid
  WHERE t.oid IN (SELECT oid FROM typed) AND a.attnum > 0 AND NOT a.attisdropped GROUP BY t.oid
), marked (root, marks) AS (
  SELECT root, jsonb_object_agg(mark, value) FROM (
    SELECT attrelid, 'column ' || attname, attnum::text FROM pg_attribute
    WHERE attrelid IN (SELECT oid FROM relation WHERE relkind = 'r') AND attnum > 0 AND NOT attisdropped
    UNION ALL SELECT u.root, w.mark, w.value FROM typed u JOIN word w ON w.type = u.oid
    WHERE u.root IN (SELECT oid FROM relation WHERE relkind = 'r')) m (root, mark, value)
  GROUP BY root
)
SELECT c.nspname, c.relname, c.relkind::text,
  c.oid || '/' || (SELECT string_agg(
     concat_ws(' ', attnum, attname, atttypid, atttypmod, attcollation, attgenerated), ',' ORDER BY attnum)
   FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped),
  concat_ws('/', c.relkind, c.relpersistence, c.relrowsecurity, c.relforcerowsecurity,
    (SELECT string_agg(oid || ' ' || xmin::text, ',' ORDER BY oid) FROM pg_policy WHERE polrelid = c.oid), '',
    (SELECT string_agg(oid || ' ' || xmin::text, ',' ORDER BY oid) FROM pg_rewrite WHERE ev_class = c.oid), '',
    (SELECT string_agg(p.oid || ' ' || p.xmin::text, ',' ORDER BY p.oid) FROM pg_rewrite r JOIN pg_depend d
       ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_proc'::regclass
       JOIN pg_proc p ON p.oid = d.refobjid WHERE r.ev_class = c.oid AND p.oid >= 16384), '',
    (SELECT string_agg(inhrelid::text, ',' ORDER BY inhrelid) FROM pg_inherits WHERE inhparent = c.oid), '',
    (SELECT string_agg(e.enumtypid || ' ' || e.enumlabel, ',' ORDER BY e.enumtypid, e.enumsortorder)
       FROM typed u JOIN pg_enum e ON e.enumtypid = u.oid WHERE u.root = c.oid), '',
    (SELECT string_agg(
       concat_ws(' ', t.oid, a.attnum, a.attname, a.atttypid, a.atttypmod), ',' ORDER BY t.oid, a.attnum)
       FROM typed u JOIN pg_type t ON t.oid = u.oid JOIN pg_attribute a ON a.attrelid = t.typrelid
       WHERE u.root = c.oid AND a.attnum > 0 AND NOT a.attisdropped)),
  (SELECT string_agg(inhparent || ' ' || xmin::text, ',' ORDER BY inhparent) FROM pg_inherits WHERE inhrelid = c.oid),
  (SELECT coalesce(array_agg(ARRAY[l.nspname::text, l.relname::text] ORDER BY l.oid), ARRAY[]::text[])
   FROM reach r JOIN relation l ON l.oid = r.oid WHERE r.root = c.oid AND l.relkind = 'r'),
  c.oid::bigint, c.relfilenode::bigint, c.written,
  coalesce(g.marks, '{}')
FROM relation c LEFT JOIN marked g ON g.root = c.oid
"""


class ObjectDefinition(msgspec.Struct, frozen=True, array_like=True):
    """The definition of a table or view: its identity and columns, all else that counts, and the tables it reads.

    `parents`: the tables it is a partition or child of, each with the transaction. `file`: its relfilenode, 0 if none;
    `writer`: the transaction that last wrote its catalogue row. `marks`, for a table, what its row values depend on:
    the number of each column, the labels of each enum, oldest first, and the attributes of each composite type,
    without their names.
    """

    kind: str
    columns: str
    rest: str
    tables: tuple[str, ...]
    parents: str = ""
    oid: int = 0  # 0: the note was written before it had oid, file and writer
    file: int = 0
    writer: int = 0
    marks: Mapping[str, str] = {}

    @property
    def meant(self) -> tuple[str, str, str, tuple[str, ...], str]:
        """Return the parts that queries depend on: not the file of the rows."""
        return self.kind, self.columns, self.rest, self.tables, self.parents


Meanings = Mapping[str, ObjectDefinition | None]  # by name; None: dropped


def read_meanings(connection: Connection) -> dict[str, ObjectDefinition]:
    """Return the current definitions of tables and views by name."""
    found: dict[str, ObjectDefinition] = {}
    for schema, name, kind, columns, rest, parents, tables, *file in connection.execute(_SQL.encode()).fetchall():
        read, texts = tuple(table_name(*each) for each in tables), (_digest(columns or ""), _digest(rest))
        found[table_name(schema, name)] = ObjectDefinition(kind, *texts, read, parents or "", *file)
    return found


def moved(before: Meanings, now: Mapping[str, ObjectDefinition], fits: Collection[str]) -> dict[str, str]:
    """Return the tables whose queries may have another meaning, each with the reason. Pure.

    No query used a new table before. `fits` are tables whose current columns the log knows: their rows showed them.
    """
    found: dict[str, str] = {}
    for name, was in before.items():
        is_ = now.get(name)
        if was is None or is_ is None:
            if was is is_:
                continue
        elif was.meant == is_.meant or _is_shown_by_rows(name, was, is_, fits):
            continue
        what = "view" if "v" in {each.kind for each in (was, is_) if each is not None} else "table"
        why = f"{what} {name} " + ("is gone" if is_ is None else "was redefined")
        for each in (was, is_):
            found |= {table: why for table in (each.tables if each is not None else ()) if table not in found}
    return found


def reattached(before: Meanings, now: Mapping[str, ObjectDefinition]) -> set[str]:
    """Return the tables that left their parent, and may have returned: in between, their changes were not sent
    if only the parent is published. Pure."""
    pairs = ((name, was, now.get(name)) for name, was in before.items())
    return {name for name, was, is_ in pairs if was and is_ and was.parents and was.parents != is_.parents}


def rewritten(before: Meanings, now: Mapping[str, ObjectDefinition]) -> dict[str, int]:
    """Return the tables whose rows are in another file than before, each with the transaction that last wrote its
    catalogue row: the table may have been unlogged in between, with changes that were not sent. Pure.

    The number of a new table's file is its oid.
    """
    known = [each for each in before.values() if each is not None]
    if not all(each.oid for each in known):
        return {}  # the note lacks the oids
    files = {each.oid: each.file for each in known}
    return {
        name: each.writer
        for name, each in now.items()
        if each.kind == "r" and each.file != files.get(each.oid, each.oid)
    }


def remarked(before: Meanings, now: Mapping[str, ObjectDefinition]) -> dict[str, str]:
    """Return the tables whose rows have other values than before though no row was written, each with the reason: a
    name belongs to another column, or a type has other labels or attributes. Pure."""
    marks = {each.oid: each.marks for each in before.values() if each is not None}
    found: dict[str, str] = {}
    for name, each in now.items():
        had = marks.get(each.oid, {})
        others = sorted(mark for mark, value in each.marks.items() if _is_other(mark, had.get(mark, value), value))
        if others:
            what, _, which = others[0].partition(" ")
            is_column = what == "column"
            found[name] = f"its column {which} is another column" if is_column else "a type of its columns was altered"
    return found


def _is_other(mark: str, had: str, value: str) -> bool:
    """Return whether existing rows have other values. No existing row has a new label."""
    return not value.startswith(had) if mark.startswith("labels ") else value != had


def _is_shown_by_rows(name: str, was: ObjectDefinition, is_: ObjectDefinition, fits: Collection[str]) -> bool:
    """Return whether only the columns of a table changed, which its rows have shown."""
    return is_.kind == "r" and (was.rest, was.tables) == (is_.rest, is_.tables) and name in fits


def owners(found: Meanings) -> dict[str, int]:
    """Return the oid of each table by name. Pure."""
    return {name: each.oid for name, each in found.items() if each is not None and each.kind == "r" and each.oid}


def remembered(before: Meanings, now: Mapping[str, ObjectDefinition]) -> dict[str, ObjectDefinition | None]:
    """Return the definitions to compare with next time: those of `now`, and None for each dropped name."""
    gone = [name for name in before if name not in now][-MOST_GONE:]
    return {**dict.fromkeys(gone, None), **now}


def load(text: str) -> dict[str, ObjectDefinition | None] | None:
    """Return the definitions stored in the note NOTE; None if the text is empty or unreadable."""
    try:
        return msgspec.json.decode(text, type=dict[str, ObjectDefinition | None]) if text else None
    except msgspec.MsgspecError:
        return None


def save(found: Meanings) -> str:
    """Return the definitions as text for the note NOTE."""
    return msgspec.json.encode(found).decode()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
