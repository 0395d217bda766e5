"""SQL of capture: our tables in the user's file, and the triggers of one table. Text only, no I/O.

Every change is one row of the capture table, with unconverted values: new values for an insert, old values for a
delete, new then old for an update. The rowid is the offset.

REPLACE deletes rows without firing DELETE triggers. A BEFORE trigger therefore searches for rows about to
collide. Where only the key can collide, the row is copied to `replaced` and the reader joins that row with
the insert that follows: one update, at no cost to inserts without a collision. Where another UNIQUE rule
exists, or a key is updated, the row is copied to `stash` and the AFTER trigger writes its delete. Statements of
triggers and foreign keys may run in between: they leave rows that are gone from the table in the stash.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from headwater.model.change import Op
from headwater.sources.sqlite.connection import OURS, ROWID_NAMES, ident
from headwater.sources.sqlite.query.affinity import affinity
from headwater.sources.sqlite.query.syntax.lexer import tokens
from headwater.sources.sqlite.schema.table_shapes import Shape, Unique

CAPTURE = OURS + "capture"
REPLACED = OURS + "replaced"
STASH = OURS + "stash"
LAYOUT = OURS + "layout"
TXN = OURS + "txn"
META = OURS + "meta"
CANARY = OURS + "canary"
END = OURS + "end"
TABLES = (CAPTURE, REPLACED, STASH, LAYOUT, TXN, META, CANARY)

_COMPARISONS = {"=", "==", "<>", "!=", "<", "<=", ">", ">=", "IS", "IN", "BETWEEN", "CASE"}
ANCHOR = 0  # op of a capture row without a change, which only reserves an offset
STASHED = 16  # newest rows of a table that stay in the stash where statements nest, though the table has them
MAX_STEPS = 4  # of generated columns computed from each other: older versions of SQLite parse 8 nested subqueries
MAX_COLUMNS = 990  # an update stores old and new values: twice this, plus our columns, is below SQLite's limit of 2000


def cells(count: int, start: int = 0) -> str:
    """Return `c0, c1, …`: the value columns of our tables."""
    return ", ".join(f"c{place}" for place in range(start, start + count))


CELL_INDEXES = (
    f"CREATE INDEX {REPLACED}_head ON {REPLACED}(head)",
    f"CREATE INDEX {STASH}_t ON {STASH}(t)",
)


def create_cell_tables(width: int) -> dict[str, str]:
    """Return the CREATE statements of our tables that hold row values, wide enough for `width` columns."""
    return {
        CAPTURE: f"CREATE TABLE {CAPTURE}(seq INTEGER PRIMARY KEY, t, op, {cells(2 * width)})",
        REPLACED: f"CREATE TABLE {REPLACED}(id INTEGER PRIMARY KEY, head, t, {cells(width)})",
        STASH: f"CREATE TABLE {STASH}(id INTEGER PRIMARY KEY, t, r, updated, {cells(width)})",
    }


def create_tables(width: int) -> list[str]:
    """Return the statements that create our tables, wide enough for rows of `width` columns."""
    return [
        *create_cell_tables(width).values(),
        *CELL_INDEXES,
        f"CREATE TABLE {LAYOUT}(id INTEGER PRIMARY KEY, name TEXT, version INTEGER, active INTEGER, shape TEXT, "
        "places TEXT)",
        f"CREATE TABLE {TXN}(upto INTEGER PRIMARY KEY, first INTEGER, ms INTEGER, us INTEGER)",  # us: µs beyond ms
        f"CREATE TABLE {META}(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
        # VACUUM renumbers the rowids of such a table: row 2 becomes row 1, which reveals the VACUUM.
        f"CREATE TABLE {CANARY}(x)",
        f"INSERT INTO {CANARY}(rowid, x) VALUES (2, 'canary')",
    ]


def widen(have: int, width: int) -> list[str]:
    """Return the statements that widen our tables from `have` to `width` columns."""
    wider = [(CAPTURE, 2 * have, 2 * width), (REPLACED, have, width), (STASH, have, width)]
    return [f"ALTER TABLE {name} ADD COLUMN c{n}" for name, low, high in wider for n in range(low, high)]


def trigger_prefix(layout: int) -> str:
    """Return the prefix of the names of a layout's triggers."""
    return f"{OURS}{layout}_"


def create_triggers(shape: Shape, layout: int, *, nests: bool) -> dict[str, str]:
    """Return trigger name to CREATE statement, in order of creation (the last created fires first).

    `nests`: a user's trigger or the action of a foreign key may write to the same table between our BEFORE and our
    AFTER trigger.
    """
    texts = _TriggerSql(shape, layout, nests)
    found = {
        "update": texts.after_update(),
        "delete": texts.after_delete(),
        "insert": texts.after_insert(),
        "before_insert": texts.before_insert(),
        "before_update": texts.before_key_update(),
        "key_update": texts.after_key_update(),
    }
    prefix = trigger_prefix(layout)
    return {prefix + name: f"CREATE TRIGGER {prefix}{name} {text}" for name, text in found.items()}


def _compares(term: str) -> bool:
    """Return whether an expression may compare values, which depends on the affinity of columns."""
    return any(token.word in _COMPARISONS for token in tokens(term))


class _TriggerSql:
    """The six trigger bodies of one table."""

    def __init__(self, shape: Shape, layout: int, nests: bool) -> None:
        self.shape, self.layout, self.nests = shape, layout, nests
        self.target = ident(shape.table.name)
        # In a subquery on a table called new or old, NEW or OLD would be that table.
        self.rows = f"{self.target} AS x" if shape.table.name.lower() in ("new", "old") else self.target
        self.names = [ident(name) for name in shape.table.names]
        self.key = [ident(name) for name in shape.table.key]
        self.width = len(self.names)
        self.merges = not shape.uniques and shape.key_is_plain
        self.rowid = ident(shape.spare_rowid) if shape.spare_rowid else None

    def after_insert(self) -> str:
        displaced = "" if self.merges else self._displaced() + " "
        return f"AFTER INSERT ON {self.target} BEGIN {displaced}{self._row(Op.INSERT, 'NEW')} END"

    def after_update(self) -> str:
        return f"AFTER UPDATE ON {self.target} BEGIN {self._row(Op.UPDATE, 'NEW', 'OLD')} END"

    def after_delete(self) -> str:
        # A row with a DELETE of its own was not displaced, even if an earlier OR IGNORE copied the row to the stash.
        first, rows = "", self._same_row("OLD")
        if self.nests:
            # An UPDATE of this row displaced rows, whose ON DELETE action removed this row: no AFTER UPDATE follows.
            updated = f"updated IS {self._identity('OLD')}"
            first, rows = self._record(f"{updated} AND NOT {self._is_there()}") + " ", f"({updated} OR {rows})"
        row = self._row(Op.DELETE, "OLD")
        return f"AFTER DELETE ON {self.target} BEGIN {first}{self._forget(rows)} {row} END"

    def before_insert(self) -> str:
        body = self._hand_over() if self.merges else self._set_aside("", "NULL")
        return f"BEFORE INSERT ON {self.target} WHEN {self._collides('')} BEGIN {body} END"

    def _hand_over(self) -> str:
        """Return statements that copy rows for the reader, those with another key than NEW with a negative layout.

        The reader joins the former with the insert, and can only report the latter. An earlier UPDATE OR IGNORE may
        have left these rows in the stash, where they are cleared first.
        """
        same_key = " AND ".join(f"{name} = NEW.{name}" for name in self.key)
        found = [(self.layout, same_key)]
        if self.rowid:
            found.append((-self.layout, f"{self.rowid} = NEW.{self.rowid} AND ({same_key}) IS NOT 1"))
        return (
            self._forget(self._again())
            + " "
            + " ".join(
                f"INSERT INTO {REPLACED}(head, t, {cells(self.width)}) SELECT (SELECT max(seq) FROM {CAPTURE}), "
                f"{mark}, {self._list('')} FROM {self.rows} WHERE {hit};"
                for mark, hit in found
            )
        )

    def before_key_update(self) -> str:
        names = [ident(self.shape.rowid)] if self.shape.rowid else self.key
        other = f" AND NOT ({' AND '.join(f'{name} IS OLD.{name}' for name in names)})"
        return (
            f"BEFORE UPDATE {self._of_keys()}ON {self.target} WHEN {self._collides(other)} "
            f"BEGIN {self._set_aside(other, self._identity('OLD'))}{self._name_columns()} END"
        )

    def _name_columns(self) -> str:
        """Return a statement that names every ordinary column of NEW if UNIQUE rules may use generated columns; or "".

        Before an UPDATE SQLite loads only the columns that are set or that a trigger names anywhere, and computes the
        generated columns of NEW from NULL for the others.
        """
        columns = self.shape.table.columns
        if not self.shape.uniques or not any(column.generated for column in columns):
            return ""
        return f" SELECT {', '.join(f'NEW.{ident(column.name)}' for column in columns if not column.generated)};"

    def after_key_update(self) -> str:
        # The stash may hold the updated row itself: an UPSERT that became this update put the row there.
        forget = self._forget(self._same_row("OLD"))
        return f"AFTER UPDATE {self._of_keys()}ON {self.target} BEGIN {forget} {self._displaced()} END"

    def _list(self, prefix: str) -> str:
        return ", ".join(prefix + name for name in self.names)

    def _row(self, op: Op, *images: str) -> str:
        values = ", ".join(self._list(image + ".") for image in images)
        places = cells(self.width * len(images))
        return f"INSERT INTO {CAPTURE}(t, op, {places}) VALUES ({self.layout}, {op:d}, {values});"

    def _same_row(self, row: str) -> str:
        """Return the condition that `row` is the stashed row: by rowid if it has one, since keys may repeat with NULLs.

        `row` is the left operand, so that its collations apply.
        """
        if self.shape.rowid:
            return f"{row}.{ident(self.shape.rowid)} IS {STASH}.r"
        pairs = zip(self.key, self.shape.table.key_places, strict=True)
        return " AND ".join(f"{row}.{name} IS {STASH}.c{place}" for name, place in pairs)

    def _identity(self, row: str) -> str:
        """Return an expression whose value identifies `row` in its table."""
        if self.shape.rowid:
            return f"{row}.{ident(self.shape.rowid)}"
        return " || ',' || ".join(f"quote({row}.{name})" for name in self.key)

    def _is_there(self) -> str:
        """Return the condition that the table has a row in the place of the stashed row."""
        return f"EXISTS (SELECT 1 FROM {self.target} AS x WHERE {self._same_row('x')})"

    def _record(self, rows: str) -> str:
        return (
            f"INSERT INTO {CAPTURE}(t, op, {cells(self.width)}) SELECT {self.layout}, {Op.DELETE:d}, "
            f"{cells(self.width)} FROM {STASH} WHERE t = {self.layout} AND {rows};"
        )

    def _forget(self, rows: str) -> str:
        return f"DELETE FROM {STASH} WHERE t = {self.layout}{' AND ' if rows else ''}{rows};"

    def _rules(self) -> list[str]:
        """Return conditions on rows that NEW would collide with; SQLite can look up each condition in indexes.

        They may match too many rows; the AFTER trigger checks again. Rules with a collation or an expression are
        separate conditions: SQLite looks up an OR in several indexes only if all its operands are plain.
        """
        plain = [" AND ".join(f"{name} = NEW.{name}" for name in self.key)]
        plain += [f"{self.rowid} = NEW.{self.rowid}"] if self.rowid else []
        plain += [self._breaks(unique) for unique in self.shape.uniques if self._is_plain(unique)]
        special = [self._breaks(unique) for unique in self.shape.uniques if not self._is_plain(unique)]
        return [" OR ".join(f"({rule})" for rule in plain), *special, *self._rules_of_next_key()]

    def _columns_of_new(self, names: Iterable[str], *, typed: bool) -> str:
        """Return the columns of a subquery that has the values of NEW.

        NEW's columns have no affinity: where column `a` of type TEXT is compared, `a = 1` is true for '1', and
        `NEW.a = 1` is not. `typed` gives them their affinity by a CAST, which keeps all values that have the type of
        the column.
        """
        return ", ".join(f"{self._cast(f'NEW.{ident(name)}', name, typed)} AS {ident(name)}" for name in names)

    def _cast(self, value: str, name: str, typed: bool) -> str:
        if not typed or (kind := self._affinities[name]) == "BLOB":
            return value
        # A column of affinity INTEGER may hold 2.5, of which CAST AS INTEGER makes 2.
        return f"CAST({value} AS {'NUMERIC' if kind == 'INTEGER' else kind})"

    @functools.cached_property
    def _affinities(self) -> dict[str, str]:
        return {column.name: affinity(column) for column in self.shape.table.columns}

    def _rules_of_next_key(self) -> list[str]:
        """Return conditions on rows that NEW would collide with once SQLite has numbered it.

        Until then NEW's key is -1, and so are the inputs of what is computed from the key.
        """
        if (numbered := self.shape.numbered) is None:
            return []
        key = ident(numbered.key)
        highest = f"coalesce((SELECT max({key}) FROM {self.rows}), 0)"
        if numbered.autoincrement:
            name = self.shape.table.name.replace("'", "''")
            seq = f"coalesce((SELECT max(seq) FROM sqlite_sequence WHERE name = '{name}'), 0)"
            highest = f"max(0, {highest}, {seq})"
        compared = numbered.generated or any(_compares(term) for unique in numbered.rules for term in unique.terms)
        found = []
        for typed in (False, True) if compared else (False,):
            inputs = [self._columns_of_new([name], typed=typed) for name in numbered.inputs]
            rows = f"(SELECT {', '.join([f'CAST({highest} + 1 AS INTEGER) AS {key}', *inputs])})"
            for step in numbered.generated:
                columns = (f"{self._cast(f'({text})', name, typed)} AS {ident(name)}" for name, text in step)
                rows = f"(SELECT *, {', '.join(columns)} FROM {rows})"
            found.append(rows)
        return [f"NEW.{key} = -1 AND {self._breaks(unique, *found)}" for unique in numbered.rules]

    def _is_plain(self, unique: Unique) -> bool:
        own = {ident(column.name): column.collation for column in self.shape.table.columns}
        pairs = zip(unique.terms, unique.collations, strict=True)
        return not unique.where and all(own.get(term) == collation.upper() for term, collation in pairs)

    def _breaks(self, unique: Unique, *rows: str) -> str:
        """Return the condition on rows that break `unique` with NEW, or with one of the subqueries `rows`."""
        plain = self._is_plain(unique)
        terms = []
        for term, collation in zip(unique.terms, unique.collations, strict=True):
            first, *others = self._of_new(term, rows)
            name = ident(collation)
            if others:
                terms.append(f"({term}) COLLATE {name} IN ({', '.join([first, *others])})")
            else:
                terms.append(f"{term} = {first}" if plain else f"({term}) = ({first} COLLATE {name})")
        rule = " AND ".join(terms)
        return f"{rule} AND ({unique.where})" if unique.where else rule

    def _collides(self, further: str) -> str:
        return " OR ".join(f"EXISTS (SELECT 1 FROM {self.rows} WHERE ({rule}){further})" for rule in self._rules())

    def _of_new(self, term: str, rows: Sequence[str]) -> list[str]:
        """Return the value of `term` in NEW, or its values in the subqueries `rows`; several are alternatives."""
        columns = self.shape.table.columns
        if any(term == ident(column.name) and not (rows and column.generated) for column in columns):
            return [f"NEW.{term}"]
        names, variants = self.shape.table.names, (False, True) if _compares(term) else (False,)
        rows = rows or [f"(SELECT {self._columns_of_new(names, typed=typed)})" for typed in variants]
        return [f"(SELECT {term} FROM {row})" for row in rows]

    def _set_aside(self, further: str, updated: str) -> str:
        rowid = ident(self.shape.rowid) if self.shape.rowid else "NULL"
        # UNION removes duplicates: one row may break several rules.
        found = " UNION ".join(
            f"SELECT {self.layout}, {rowid}, {updated}, {self._list('')} FROM {self.rows} WHERE ({rule}){further}"
            for rule in self._rules()
        )
        done = self._is_there()  # or about to be displaced by a statement in which this one nests
        if self.nests:
            newest = f"SELECT id FROM {STASH} WHERE t = {self.layout} ORDER BY id DESC LIMIT 1 OFFSET {STASHED}"
            oldest = f"id <= ({newest})"
            done = f"({self._again()} OR ({oldest} AND {done}))"
        return f"{self._forget(done)} INSERT INTO {STASH}(t, r, updated, {cells(self.width)}) {found};"

    def _again(self) -> str:
        """Return the condition on stashed rows that NEW would collide with now."""
        either = " OR ".join(f"({rule})" for rule in self._rules())
        return f"EXISTS (SELECT 1 FROM {self.target} AS x WHERE ({either}) AND {self._same_row('x')})"

    def _displaced(self) -> str:
        """Return statements that record deletes for stashed rows that are gone, or that NEW has replaced."""
        displaced = f"(({self._same_row('NEW')}) OR NOT {self._is_there()})"
        return f"{self._record(displaced)} {self._forget(displaced if self.nests else '')}"

    def _of_keys(self) -> str:
        """Return `OF a, b` if the columns that can cause a collision are known, so that other updates cost nothing."""
        terms = [term for unique in self.shape.uniques for term in unique.terms]
        plain = all(term in self.names for term in terms) and not any(u.where for u in self.shape.uniques)
        columns = [name for name in self.names if name in {*self.key, *terms}]
        generated = {ident(column.name) for column in self.shape.table.columns if column.generated}
        if not plain or generated.intersection(columns):
            return ""
        # SQLite matches columns by the name that the UPDATE uses, so the names of the rowid are listed as well.
        rowid = [ident(name) for name in ROWID_NAMES if self.shape.rowid and ident(name) not in columns]
        return f"OF {', '.join([*columns, *rowid])} "
