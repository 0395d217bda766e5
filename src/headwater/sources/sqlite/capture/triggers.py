"""The SQL of capture: our tables in the user's file, and the triggers of one table. Text only, no I/O.

Every change is one row of the capture table, its typed columns unconverted: new values for an insert, old
ones for a delete, new then old for an update. The rowid is the offset.

REPLACE deletes rows without firing DELETE triggers. A BEFORE trigger therefore looks for rows about to
collide. Where only the key can collide, the row is set aside in `replaced` and the reader joins it with
the insert that follows: one update, at no cost to inserts that collide with nothing. Where another UNIQUE
rule exists, or a key is updated, the row goes to `stash` and the AFTER trigger writes its delete.
"""

from __future__ import annotations

from headwater.model.change import Op
from headwater.sources.sqlite.connection import OURS, ident
from headwater.sources.sqlite.schema.table_shapes import ROWID_NAMES, Shape, Unique

CAPTURE = OURS + "capture"
REPLACED = OURS + "replaced"
STASH = OURS + "stash"
LAYOUT = OURS + "layout"
TXN = OURS + "txn"
META = OURS + "meta"
CANARY = OURS + "canary"
END = OURS + "end"
TABLES = (CAPTURE, REPLACED, STASH, LAYOUT, TXN, META, CANARY)

ANCHOR = 0  # op of a capture row that is no change: it only holds a place in the numbering
MAX_COLUMNS = 990  # an update holds old and new: twice this, and ours, stay under SQLite's 2000


def cells(count: int, start: int = 0) -> str:
    """`c0, c1, …`: the value columns of our tables."""
    return ", ".join(f"c{place}" for place in range(start, start + count))


CELL_INDEXES = (
    f"CREATE INDEX {REPLACED}_head ON {REPLACED}(head)",
    f"CREATE INDEX {STASH}_t ON {STASH}(t)",
)


def create_cell_tables(width: int) -> dict[str, str]:
    """Those of our tables that hold values of rows, wide enough for `width` columns."""
    return {
        CAPTURE: f"CREATE TABLE {CAPTURE}(seq INTEGER PRIMARY KEY, t, op, {cells(2 * width)})",
        REPLACED: f"CREATE TABLE {REPLACED}(id INTEGER PRIMARY KEY, head, t, {cells(width)})",
        STASH: f"CREATE TABLE {STASH}(id INTEGER PRIMARY KEY, t, r, {cells(width)})",
    }


def create_tables(width: int) -> list[str]:
    """Our tables, wide enough for rows of `width` columns."""
    return [
        *create_cell_tables(width).values(),
        *CELL_INDEXES,
        f"CREATE TABLE {LAYOUT}(id INTEGER PRIMARY KEY, name TEXT, version INTEGER, active INTEGER, shape TEXT, "
        "places TEXT)",
        f"CREATE TABLE {TXN}(upto INTEGER PRIMARY KEY, first INTEGER, ms INTEGER, us INTEGER)",  # us: beyond ms
        f"CREATE TABLE {META}(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
        # VACUUM renumbers rowids of tables like this one: row 2 becomes row 1, and we notice.
        f"CREATE TABLE {CANARY}(x)",
        f"INSERT INTO {CANARY}(rowid, x) VALUES (2, 'canary')",
    ]


def widen(have: int, width: int) -> list[str]:
    """Statements that make our tables as wide as `width` columns need, from `have`."""
    wider = [(CAPTURE, 2 * have, 2 * width), (REPLACED, have, width), (STASH, have, width)]
    return [f"ALTER TABLE {name} ADD COLUMN c{n}" for name, low, high in wider for n in range(low, high)]


def trigger_prefix(layout: int) -> str:
    """How the names of a layout's triggers begin."""
    return f"{OURS}{layout}_"


def create_triggers(shape: Shape, layout: int, *, nests: bool = False) -> dict[str, str]:
    """Trigger name to its CREATE statement, in the order of creation (the last created fires first).

    `nests`: between our BEFORE and our AFTER a trigger of the user may write to the same table.
    """
    texts = _Texts(shape, layout, nests)
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


class _Texts:
    """The six trigger bodies of one table."""

    def __init__(self, shape: Shape, layout: int, nests: bool) -> None:
        self.shape, self.layout, self.nests = shape, layout, nests
        self.target = ident(shape.table.name)
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
        # A row that went with a DELETE of its own was not displaced, whatever an earlier OR IGNORE set aside.
        return f"AFTER DELETE ON {self.target} BEGIN {self._forget_old()} {self._row(Op.DELETE, 'OLD')} END"

    def before_insert(self) -> str:
        body = self._hand_over() if self.merges else self._set_aside("")
        return f"BEFORE INSERT ON {self.target} WHEN {self._collides('')} BEGIN {body} END"

    def _hand_over(self) -> str:
        """Rows for the reader to join with the insert. Those with another key (negative) he can only report.

        An earlier UPDATE OR IGNORE may have left them in the stash; from here on they may go without a trace there.
        """
        same_key = " AND ".join(f"{name} = NEW.{name}" for name in self.key)
        found = [(self.layout, same_key)]
        if self.rowid:
            found.append((-self.layout, f"{self.rowid} = NEW.{self.rowid} AND ({same_key}) IS NOT 1"))
        return (
            self._clear_stash(self._again())
            + " "
            + " ".join(
                f"INSERT INTO {REPLACED}(head, t, {cells(self.width)}) SELECT (SELECT max(seq) FROM {CAPTURE}), "
                f"{mark}, {self._list('')} FROM {self.target} WHERE {hit};"
                for mark, hit in found
            )
        )

    def before_key_update(self) -> str:
        names = [ident(self.shape.rowid)] if self.shape.rowid else self.key
        other = f" AND NOT ({' AND '.join(f'{name} IS OLD.{name}' for name in names)})"
        return (
            f"BEFORE UPDATE {self._of_keys()}ON {self.target} WHEN {self._collides(other)} "
            f"BEGIN {self._set_aside(other)} END"
        )

    def after_key_update(self) -> str:
        # The updated row itself may stand in the stash: an UPSERT that became this update set it aside.
        return f"AFTER UPDATE {self._of_keys()}ON {self.target} BEGIN {self._forget_old()} {self._displaced()} END"

    def _list(self, prefix: str) -> str:
        return ", ".join(prefix + name for name in self.names)

    def _row(self, op: Op, *images: str) -> str:
        values = ", ".join(self._list(image + ".") for image in images)
        places = cells(self.width * len(images))
        return f"INSERT INTO {CAPTURE}(t, op, {places}) VALUES ({self.layout}, {op:d}, {values});"

    def _same_row(self, row: str) -> str:
        """Whether `row` is the one in the stash: by its rowid, since NULLs may repeat in a key, if it has one.

        The row stands left: its collations count.
        """
        if self.shape.rowid:
            return f"{row}.{ident(self.shape.rowid)} IS {STASH}.r"
        pairs = zip(self.key, self.shape.table.key_places, strict=True)
        return " AND ".join(f"{row}.{name} IS {STASH}.c{place}" for name, place in pairs)

    def _forget_old(self) -> str:
        return f"DELETE FROM {STASH} WHERE t = {self.layout} AND {self._same_row('OLD')};"

    def _rules(self) -> list[str]:
        """Conditions on rows that NEW would collide with; each one alone can be looked up in indexes.

        May name too many; the AFTER trigger looks again. Rules with a collation or an expression stand by
        themselves: SQLite looks up an OR in several indexes only if all its sides are plain.
        """
        plain = [" AND ".join(f"{name} = NEW.{name}" for name in self.key)]
        plain += [f"{self.rowid} = NEW.{self.rowid}"] if self.rowid else []
        plain += [self._breaks(unique) for unique in self.shape.uniques if self._is_plain(unique)]
        special = [self._breaks(unique) for unique in self.shape.uniques if not self._is_plain(unique)]
        return [" OR ".join(f"({rule})" for rule in plain), *special]

    def _is_plain(self, unique: Unique) -> bool:
        own = {ident(column.name): column.collation for column in self.shape.table.columns}
        pairs = zip(unique.terms, unique.collations, strict=True)
        return not unique.where and all(own.get(term) == collation.upper() for term, collation in pairs)

    def _breaks(self, unique: Unique) -> str:
        plain = self._is_plain(unique)
        rule = " AND ".join(
            f"{term} = {self._of_new(term)}"
            if plain
            else f"({term}) = ({self._of_new(term)} COLLATE {ident(collation)})"
            for term, collation in zip(unique.terms, unique.collations, strict=True)
        )
        return f"{rule} AND ({unique.where})" if unique.where else rule

    def _collides(self, further: str) -> str:
        return " OR ".join(f"EXISTS (SELECT 1 FROM {self.target} WHERE ({rule}){further})" for rule in self._rules())

    def _of_new(self, term: str) -> str:
        if term in self.names:
            return f"NEW.{term}"
        new = ", ".join(f"NEW.{name} AS {name}" for name in self.names)
        return f"(SELECT {term} FROM (SELECT {new}))"

    def _set_aside(self, further: str) -> str:
        rowid = ident(self.shape.rowid) if self.shape.rowid else "NULL"
        # UNION, for one row may break several rules.
        found = " UNION ".join(
            f"SELECT {self.layout}, {rowid}, {self._list('')} FROM {self.target} WHERE ({rule}){further}"
            for rule in self._rules()
        )
        return f"{self._clear_stash(self._again())} INSERT INTO {STASH}(t, r, {cells(self.width)}) {found};"

    def _again(self) -> str:
        """Rows of the stash that NEW would collide with now."""
        either = " OR ".join(f"({rule})" for rule in self._rules())
        return f"EXISTS (SELECT 1 FROM {self.target} AS x WHERE ({either}) AND {self._same_row('x')})"

    def _displaced(self) -> str:
        """Deletes for rows set aside that are gone now, or whose place NEW has taken."""
        gone = f"NOT EXISTS (SELECT 1 FROM {self.target} AS x WHERE {self._same_row('x')})"
        displaced = f"(({self._same_row('NEW')}) OR {gone})"
        return (
            f"INSERT INTO {CAPTURE}(t, op, {cells(self.width)}) SELECT {self.layout}, {Op.DELETE:d}, "
            f"{cells(self.width)} FROM {STASH} WHERE t = {self.layout} AND {displaced}; {self._clear_stash(displaced)}"
        )

    def _clear_stash(self, mine: str) -> str:
        """What is left there is of no use any more, but where triggers nest only what is `mine`."""
        return f"DELETE FROM {STASH} WHERE t = {self.layout}{f' AND {mine}' if self.nests else ''};"

    def _of_keys(self) -> str:
        """`OF a, b` when the columns a collision depends on are known, so that other updates pay nothing."""
        terms = [term for unique in self.shape.uniques for term in unique.terms]
        plain = all(term in self.names for term in terms) and not any(u.where for u in self.shape.uniques)
        columns = [name for name in self.names if name in {*self.key, *terms}]
        if not plain or self._generated().intersection(columns):
            return ""
        # SQLite matches these by the name the UPDATE uses, so the rowid's own names count as well.
        rowid = [ident(name) for name in ROWID_NAMES if self.shape.rowid and ident(name) not in columns]
        return f"OF {', '.join([*columns, *rowid])} "

    def _generated(self) -> set[str]:
        return {ident(column.name) for column in self.shape.table.columns if column.generated}
