"""Random schemas, rows and writes over small domains. All is text and follows from a seed, so it can be shrunk."""

from __future__ import annotations

import random
from typing import Any

import msgspec

TYPES = ["INTEGER", "INTEGER", "TEXT", "TEXT", "REAL", "BLOB", "NUMERIC", ""]
ODD_TYPES = [
    "BOOLEAN",
    "DATE",
    "DECIMAL_TEXT",
    "JSON_TEXT",
    "VARCHAR(9)",
    "UNSIGNED BIG INT",
    "DOUBLE PRECISION",
    "INT",
]
STRICT_TYPES = ["INTEGER", "INT", "TEXT", "REAL", "BLOB", "ANY"]
COLLATIONS = ["", "", "", " COLLATE NOCASE", " COLLATE NOCASE", " COLLATE RTRIM"]
# Values of one family are nearly equal: a rule that tells them apart wrongly is seen.
FAMILIES: list[list[Any]] = [
    [1, 1.0, "1", "01", "1.0", "1 ", b"1", 2, "2"],
    [0, 0.0, -0.0, "0", "", b"", "-0"],
    ["a", "A", "a ", "b", "B", b"a", "ab"],
    ["a", "A", "\u00e9", "\u00c9", "e", "K", "\u212a"],
    [2**53 + 1, 2**53, float(2**53), "9007199254740993", 2**63 - 1, float(2**63), -(2**63)],
    [0.5, "0.5", ".5", 1.5, 1, 2],
    ["2024-01-01", "2024-01-02", "12.50", "12.5", 12.5, '{"a": 1}', '{"a":1}'],
    ["x%", "x_", "x", "X", "xx", "1x"],
]


def literal(value: Any) -> str:
    """Return `value` as an SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else repr(value)


class Named(msgspec.Struct):
    """A table, a view, a WITH clause or a derived table that a query can name."""

    name: str
    columns: list[str]
    rowid: bool = False


class TableSpec(msgspec.Struct):
    """A table, and the columns that writes need to know."""

    name: str
    sql: str
    columns: list[str]
    key: list[str]
    written: list[str]  # columns that can be set
    rowid: bool


class Step(msgspec.Struct):
    """Statements of one step: our writer runs them in one transaction, another connection (`foreign`) each by itself,
    as VACUUM requires; the kit over HTTP decides by itself.
    """

    statements: list[str]
    foreign: bool = False
    moves_schema: bool = False  # definitions, indexes or statistics


class World:
    """One random schema with its rows and writes; queries are made by `grammar.Queries` over it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"world {seed}")
        self._plans = random.Random(f"plans {seed}")  # of its own: the rest of a world is the same with and without
        families = self.random.sample(FAMILIES, self.random.choice([1, 1, 2]))
        dirty = [value for family in families for value in family]
        # Few values, and most often the same ones: joins meet, and answers hold rows.
        self.core: list[Any] = self.pick([[0, 1, 2], [1, 1, 2], ["a", "A", 1], [1, "1", 0], [1, 2], ["a", "A", "a "]])
        self.dirty: list[Any] = self.random.sample(dirty, min(len(dirty), self.random.randint(2, 6)))
        self.tables = [self._table(f"t{place}") for place in range(self.random.choice([2, 2, 3]))]
        self.rows = [sql for table in self.tables for sql in self._rows(table)]
        self.views: list[tuple[Named, str]] = []
        self.indexes: list[str] = []
        self._planned: list[str] = []  # indexes of `plan_steps`
        self._serial = 0

    def pick(self, options: Any) -> Any:
        return options[self.random.randrange(len(options))]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def value(self) -> Any:
        roll = self.random.random()
        return self.pick(self.core) if roll < 0.6 else self.pick(self.dirty) if roll < 0.92 else None

    @property
    def sources(self) -> list[Named]:
        """Return what FROM may name."""
        tables = [Named(table.name, table.columns, table.rowid) for table in self.tables]
        return [*tables, *tables, *(view for view, _ in self.views)]

    # --- tables ----------------------------------------------------------------------------------------------

    def _table(self, name: str) -> TableSpec:
        strict = self.chance(0.12)
        names = ["a", "b", "c", "d"][: self.random.choice([2, 3, 3, 4])]
        if self.chance(0.3):
            names[-1] = f"{name}x"  # not every name is shared
        parts = [f"{column} {self._type(strict)}" for column in names]
        kind = self.random.random()
        columns, tail, key = ["k", *names], [], ["k"]
        if kind < 0.5:
            parts.insert(0, "k INTEGER PRIMARY KEY")
        elif kind < 0.6:
            parts.insert(0, f"k {self.pick(['TEXT', 'REAL', 'INT', 'BLOB'])}{self.pick(COLLATIONS)} PRIMARY KEY")
        elif kind < 0.72:
            parts.insert(0, "k INTEGER")
            key = []
        elif kind < 0.86:
            parts.insert(0, f"k {self.pick(['TEXT', 'INTEGER', 'REAL'])}{self.pick(COLLATIONS)} NOT NULL")
            key = ["k", names[0]]
            tail.append(f"PRIMARY KEY (k, {names[0]})")
        else:
            parts.insert(0, "k INTEGER NOT NULL UNIQUE")
        written = list(columns)
        if not strict and self.chance(0.12):
            how = self.pick(["VIRTUAL", "STORED"])
            of = self.pick([f"{names[0]} + 1", f"coalesce({names[-1]}, k)", f"k || {names[0]}"])
            parts.append(f"g {self.pick(['INTEGER', 'TEXT', 'REAL'])} GENERATED ALWAYS AS ({of}) {how}")
            columns = [*columns, "g"]
        without = kind < 0.6 and self.chance(0.2) or (0.72 <= kind < 0.86 and self.chance(0.5))
        options = ", ".join(["STRICT"] * strict + ["WITHOUT ROWID"] * without)
        sql = f"CREATE TABLE {name}({', '.join(parts + tail)}) {options}".rstrip()
        return TableSpec(name, sql, columns, key, written, not without)

    def _type(self, strict: bool) -> str:
        if strict:
            return self.pick(STRICT_TYPES) + self.pick(COLLATIONS)
        return (self.pick(ODD_TYPES) if self.chance(0.08) else self.pick(TYPES)) + self.pick(COLLATIONS)

    def _rows(self, table: TableSpec) -> list[str]:
        return [self._insert(table, "INSERT", key=place) for place in range(self.random.randint(4, 8))]

    def add_view(self, sql: str, columns: list[str]) -> None:
        """Create a view of the query."""
        name = f"v{len(self.views)}"
        self.views.append((Named(name, columns), f"CREATE VIEW {name}({', '.join(columns)}) AS {sql}"))

    @property
    def setup(self) -> list[str]:
        """Return all statements that create this world."""
        return [table.sql for table in self.tables] + self.rows + [sql for _, sql in self.views]

    # --- writes ----------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Return one step."""
        roll = self.random.random()
        if roll < 0.07:
            return self._schema_step()
        count = 1 if roll < 0.75 else self.random.randint(2, 4)
        return Step([self._write() for _ in range(count)], foreign=self.chance(0.06))

    def _schema_step(self) -> Step:
        table = self.pick(self.tables)
        self._serial += 1
        roll = self.random.random()
        if roll < 0.15:
            default = f" DEFAULT {literal(self.pick([0, 'a', None]))}" if self.chance(0.7) else ""
            return Step(
                [f"ALTER TABLE {table.name} ADD COLUMN n{self._serial} {self.pick(TYPES)}{default}"], False, True
            )
        if roll < 0.3 and self.views:
            view, sql = self.pick(self.views)
            return Step([f"DROP VIEW {view.name}", sql], False, True)
        if roll < 0.36 and self.views:
            (view, sql), (_, other) = self.pick(self.views), self.pick(self.views)
            body = other.split(" AS ", 1)[1]
            return Step([f"DROP VIEW {view.name}", f"CREATE VIEW {view.name} AS {body}"], False, True)
        if roll < 0.6:
            columns = ", ".join(self.random.sample(table.columns, self.random.randint(1, min(3, len(table.columns)))))
            self.indexes.append(f"i{self._serial}")
            return Step([f"CREATE INDEX i{self._serial} ON {table.name}({columns})"], False, True)
        if roll < 0.7 and self.indexes:
            return Step([f"DROP INDEX IF EXISTS {self.pick(self.indexes)}"], False, True)
        if roll < 0.8:
            return Step(["ANALYZE"], True, True)
        if roll < 0.92:
            return Step(["VACUUM"], True, True)
        return Step(
            [f"ALTER TABLE {table.name} RENAME COLUMN {self.pick(table.written)} TO r{self._serial}"], False, True
        )

    def plan_steps(self) -> list[Step]:
        """Return, at random, steps that change only query plans."""
        if self._plans.random() > 0.15:
            return []
        self._serial += 1
        table, roll = self._plans.choice(self.tables), self._plans.random()
        foreign = self._plans.random() < 0.5
        if roll < 0.35:
            columns = ", ".join(self._plans.sample(table.columns, self._plans.randint(1, min(3, len(table.columns)))))
            self._planned.append(f"p{self._serial}")
            return [Step([f"CREATE INDEX {self._planned[-1]} ON {table.name}({columns})"], foreign, True)]
        if roll < 0.55 and self._planned:
            return [Step([f"DROP INDEX IF EXISTS {self._plans.choice(self._planned)}"], foreign, True)]
        if roll < 0.8:
            return [Step([self._plans.choice(["ANALYZE", "ANALYZE", f"ANALYZE {table.name}"])], foreign, True)]
        if roll < 0.85:
            return [Step(["PRAGMA optimize = 0x10002"], True, True)]
        stat = self._plans.choice(["9 9 9 9", "9 1 1 1", "1000000 1000000 1 1", "1000000 1 1 1"])
        edit = f"UPDATE sqlite_stat1 SET stat = '{stat}' WHERE rowid % 2 = {self._plans.randrange(2)}"
        return [Step(["DELETE FROM sqlite_stat4", edit], True, True)]

    def last_step(self) -> Step:
        """Return a step that changes only query plans: an index on every table, and statistics."""
        made = []
        for table in self.tables:
            columns = self.random.sample(table.columns, self.random.randint(1, min(3, len(table.columns))))
            made.append(f"CREATE INDEX last_{table.name} ON {table.name}({', '.join(columns)})")
        return Step([*made, "ANALYZE"], True, True)

    def _write(self) -> str:
        table, roll = self.pick(self.tables), self.random.random()
        if roll < 0.25:
            return self._insert(table, "INSERT")
        if roll < 0.31:
            return self._insert(table, "INSERT OR REPLACE")
        if roll < 0.34:
            return self._insert(table, "INSERT OR IGNORE")
        if roll < 0.39 and table.key:
            column = self.pick(table.written)
            target = f"ON CONFLICT({', '.join(table.key)}) DO UPDATE SET {column} = excluded.{column}"
            return f"{self._insert(table, 'INSERT')} {target if self.chance(0.8) else 'ON CONFLICT DO NOTHING'}"
        if roll < 0.55:
            return f"DELETE FROM {table.name} WHERE {self._where(table)}"
        if roll < 0.61:
            return f"UPDATE {table.name} SET k = {self.pick(['k + 1', 'k + 10', '-k', '7', literal(self.value())])}" + (
                f" WHERE {self._where(table)}"
            )
        if roll < 0.66:
            column = self.pick(table.written)
            same = self.pick([column, f"{column} + 0", f"CAST({column} AS REAL)", f"-(-{column})", f"{column} || ''"])
            return f"UPDATE {table.name} SET {column} = {same} WHERE {self._where(table)}"
        columns = self.random.sample(table.written, 1 if self.chance(0.8) else 2)
        pairs = ", ".join(f"{column} = {literal(self.value())}" for column in columns)
        return f"UPDATE {table.name} SET {pairs} WHERE {self._where(table)}"

    def _where(self, table: TableSpec) -> str:
        if self.chance(0.65):
            return f"k {self.pick(['=', '=', '=', '=', '>='])} {self.random.randint(0, 6)}"
        column = self.pick(table.columns)
        value = self.value()
        return f"{column} IS NULL" if value is None else f"{column} = {literal(value)}"

    def _insert(self, table: TableSpec, verb: str, key: int | None = None) -> str:
        names = list(table.written)
        values = {name: literal(self.value()) for name in names}
        values["k"] = literal(key if key is not None else self.random.randint(0, 19))
        if key is None and self.chance(0.1):
            values["k"] = literal(self.value())
        if self.chance(0.1):
            names.pop()
        return f"{verb} INTO {table.name}({', '.join(names)}) VALUES ({', '.join(values[name] for name in names)})"
