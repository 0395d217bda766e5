"""The current shape of a table from the catalogue, and the SQL names of its types."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headwater.errors import Busy, HeadwaterError, InvalidRequest, NotFound, NotSupported
from headwater.model.table import Column, Row, Table
from headwater.sources.postgres.errors import LOCK_TIMEOUT, state_of
from headwater.sources.postgres.protocol_session import Answer, Link
from headwater.sources.postgres.schema.catalog import COLLATION
from headwater.sources.postgres.schema.lock_free_catalog import COUNTS
from headwater.sources.postgres.schema.relations import column_of, split_name, table_name
from headwater.sources.postgres.schema.table_facts import ColumnFact
from headwater.sources.postgres.types import TypeFact, base_of
from headwater.sources.postgres.values import Bound, cell_reader, to_bound
from headwater.sources.request_checks import no_column

HOLD_SECONDS = 30.0  # longest wait for a lock held by an ALTER TABLE
_ABSENT = frozenset({"42P01", "3F000", "42809"})  # no such table; no such schema; not a table
OURS = "_headwater"  # prefix of the names of our own schemas and tables
Known = Callable[[str], Table | None]  # the newest shape of a table in the log


def ident(name: str) -> str:
    """Return a name quoted for SQL; no name enters SQL text unquoted."""
    if "\0" in name or not name:
        raise InvalidRequest("a name cannot be empty or hold a NUL character")
    return '"' + name.replace('"', '""') + '"'


class Shape(msgspec.Struct, frozen=True):
    """A table as it is now. `casts` are the SQL types of the columns, without their length limits."""

    table: Table
    oid: int
    sql: str  # the quoted name of the table
    casts: tuple[str, ...]
    types: tuple[int, ...]  # base types, with domains resolved
    is_partitioned: bool = False
    has_rules: bool = True  # has, or may have, rules or row security, whose expressions may read other tables

    def cast(self, name: str) -> str:
        """Return the type of column `name` as SQL, without its length limit."""
        return self.casts[self.place(name)]

    def place(self, name: str) -> int:
        """Return the position of a column in a row; InvalidRequest if there is no column of this name."""
        place = self.table.index.get(name)
        if place is None:
            raise no_column(self.table, name, [column.name for column in self.table.visible])
        return place

    def column(self, name: str) -> Column:
        """Return the column called `name`; InvalidRequest if there is none."""
        return self.table.columns[self.place(name)]

    def bound(self, name: str, value: object) -> Bound:
        """Return `value` as a bound parameter for column `name`."""
        declared = "bytea" if self.column(name).kind == "bytes" else self.column(name).declared
        return to_bound(value, declared)  # type: ignore[arg-type]

    def rows(self, answer: Answer) -> list[Row]:
        """Return the rows of an answer that has all columns in their order."""
        readers = [cell_reader(oid) for oid in self.types]
        return [tuple([read(cell) for read, cell in zip(readers, row, strict=True)]) for row in answer.rows]

    @property
    def own(self) -> str:
        """Return the SQL of the table's own rows: those of inheriting tables are captured and kept under their names.
        All rows of a partitioned table are in its partitions."""
        return self.sql if self.is_partitioned else f"ONLY {self.sql}"

    @property
    def column_list(self) -> str:
        """Return the names of all columns, quoted and separated by commas."""
        return ", ".join(map(ident, self.table.names))

    def need_key(self) -> None:
        """Raise NotSupported if the table has no key."""
        if not self.table.key:
            raise NotSupported(
                f"table {self.table.name!r} has no primary key: its rows cannot be distinguished",
                hint="Add a primary key, or use REPLICA IDENTITY USING INDEX.",
            )


_COLUMNS = """
SELECT c.oid, c.relkind, a.attname, a.atttypid, a.atttypmod, NOT a.attnotnull, a.attgenerated,
       a.attidentity <> '' OR coalesce({counts}, false), d.adbin IS NOT NULL,
       {collation},
       k.place, format_type(a.atttypid, -1), c.relhasrules OR c.relrowsecurity
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum AND a.attgenerated = ''
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_index i ON i.indrelid = c.oid
  AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate
    ELSE i.indisprimary END
LEFT JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
  ON k.number = a.attnum AND k.place <= i.indnkeyatts
WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p')
  AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
ORDER BY a.attnum
""".replace("{counts}", COUNTS).replace("{collation}", COLLATION)
_TYPES = "SELECT oid, format_type(oid, NULL), typbasetype FROM pg_type"
STORED_IN_STREAM = 180000  # the first server version whose stream has stored generated columns


class Shapes:
    """The catalogue's shapes. `known` gives the version of a shape, and which columns the stream sends.

    `version` gives the last version of a name: a shape that the log lacks gets the next one.
    """

    def __init__(self, known: Known = lambda name: None, version: Callable[[str], int] = lambda name: 0) -> None:
        self._known, self._version = known, version
        self._types: dict[int, TypeFact] = {}  # replaced as a whole, which makes it thread-safe

    def shape(self, link: Link, name: str) -> Shape:
        """Return the shape of the table called `name`, or raise NotFound."""
        found = self.find(link, name)
        if found is None:
            raise _missing(name)
        return found

    def find(self, link: Link, name: str) -> Shape | None:
        """Return the shape of the table called `name`; None if there is none."""
        parts = _parts(name)
        if parts is None:
            return None
        rows = link.run(_COLUMNS, [part.encode() for part in parts]).values()
        rows = [row for row in rows if row[6] == "" or (row[6] == "s" and link.version >= STORED_IN_STREAM)]
        if not rows:
            return None
        if any(row[3] not in self._types for row in rows):
            self._types = {oid: TypeFact(text, base) for oid, text, base in link.run(_TYPES).values()}
        return self._made(parts, rows)

    def _made(self, parts: tuple[str, str], rows: Sequence[tuple[object, ...]]) -> Shape:
        types = self._types
        columns, casts, oids = [], [], []
        for _, _, column, oid, typmod, nullable, generated, auto, default, collation, _, cast, _ in rows:
            assert isinstance(oid, int) and isinstance(typmod, int)
            fact = ColumnFact(bool(nullable), generated != "", bool(auto), bool(default), str(collation))
            columns.append(column_of(str(column), oid, typmod, fact, types))
            oids.append(base_of(oid, types))
            casts.append(str(cast))
        keyed = sorted((row for row in rows if row[10] is not None), key=lambda row: int(str(row[10])))
        table = Table(table_name(*parts), tuple(columns), tuple(str(row[2]) for row in keyed))
        shape = Shape(
            table,
            int(str(rows[0][0])),
            f"{ident(parts[0])}.{ident(parts[1])}",
            tuple(casts),
            tuple(oids),
            rows[0][1] == "p",
            bool(rows[0][12]),
        )
        return self._as_known(shape)

    def _as_known(self, shape: Shape) -> Shape:
        """Return the shape with the log's version and columns, if the columns are equal."""
        known = self._known(shape.table.name)
        if known is None or not _fits(known, shape.table):
            table = msgspec.structs.replace(shape.table, version=self._version(shape.table.name) + 1)
            return msgspec.structs.replace(shape, table=table)
        places = [shape.table.index[name] for name in known.names]
        casts, types = tuple(shape.casts[p] for p in places), tuple(shape.types[p] for p in places)
        return msgspec.structs.replace(shape, table=known, casts=casts, types=types)


def hold(link: Link, name: str, seconds: float = HOLD_SECONDS) -> None:
    """Lock a table against changes until the transaction ends. Call it first in the transaction: it takes no snapshot.

    TRUNCATE and table rewrites leave no rows for older snapshots. A snapshot taken before the lock would find the table
    empty, though it had rows at that time. Raises NotFound; Busy if somebody alters the table for too long.
    """
    parts = _parts(name)
    if parts is None:
        raise _missing(name)
    wait = f"SET LOCAL lock_timeout = {max(round(seconds * 1000), 1)}"
    try:
        link.script(f"{wait}; LOCK TABLE {ident(parts[0])}.{ident(parts[1])} IN ACCESS SHARE MODE")
    except HeadwaterError as error:
        if state_of(error) in _ABSENT:
            raise _missing(name) from None
        if state_of(error) == LOCK_TIMEOUT:
            problem = f"table {name!r} is being altered: it could not be read for {seconds:g} seconds"
            raise Busy(problem, hint="Try again when the session with the lock has committed: see pg_locks.") from error
        raise


def _parts(name: str) -> tuple[str, str] | None:
    """Return schema and table of a name that a user's table can have; None otherwise."""
    parts = split_name(name) if "\0" not in name else None
    return None if parts is None or parts[0].startswith(OURS) or parts[1].startswith(OURS) else parts


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no table {name!r}", hint="Tables outside the schema public are `schema.table`.")


def _fits(known: Table, table: Table) -> bool:
    """Return whether `known` has the columns of `table`, possibly without generated ones."""
    are = {column.name: column.declared for column in table.columns}
    if any(are.get(column.name) != column.declared for column in known.columns):
        return False
    return all(column.name in known.index or column.generated for column in table.columns)
