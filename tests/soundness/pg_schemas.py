"""Random PostgreSQL tables, queries and writes over small domains. All is text and follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from headwater.model.literal import Date, DateTime

U1, U2 = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-00000000000a"
# Of each type: the same value as SQL and as an argument. Values of one type are nearly equal.
VALUES: dict[str, list[tuple[str, Any]]] = {
    "int": [("0", 0), ("1", 1), ("2", 2), ("-1", -1)],
    "smallint": [("0", 0), ("1", 1), ("2", 2)],
    "bigint": [("0", 0), ("1", 1), ("2", 2), ("9007199254740993", 9007199254740993), ("9007199254740992", 2**53)],
    "text": [("''", ""), ("'a'", "a"), ("'A'", "A"), ("'a '", "a "), ("'b'", "b")],
    "varchar(2)": [("''", ""), ("'a'", "a"), ("'A'", "A"), ("'a '", "a "), ("'a  '", "a  ")],
    "char(3)": [("'a'", "a"), ("'a  '", "a"), ("'b'", "b")],
    "numeric": [("0", Decimal(0)), ("1", Decimal(1)), ("1.0", Decimal("1.0")), ("1.00", Decimal("1.00"))],
    "numeric(6,2)": [("0", Decimal(0)), ("1", Decimal(1)), ("1.005", Decimal("1.005")), ("1.01", Decimal("1.01"))],
    "double precision": [("0", 0.0), ("'-0'", -0.0), ("1", 1.0), ("1.5", 1.5), ("'NaN'", float("nan"))],
    "bool": [("true", True), ("false", False)],
    "uuid": [(f"'{U1}'", UUID(U1)), (f"'{U2}'", UUID(U2))],
    "date": [("'2024-01-01'", Date("2024-01-01")), ("'2024-01-02'", Date("2024-01-02")), ("'infinity'", "infinity")],
    "timestamptz": [
        ("'2024-01-01 00:00+00'", DateTime("2024-01-01T00:00:00+00:00")),
        ("'2024-01-01 02:00+02'", DateTime("2024-01-01T02:00:00+02:00")),
        ("'2024-01-01 00:00:00.5+00'", DateTime("2024-01-01T00:00:00.5+00:00")),
        ("'2023-12-31 23:59:59.999999+00'", DateTime("2023-12-31T23:59:59.999999+00:00")),
    ],
    "timestamptz(0)": [
        ("'2024-01-01 00:00+00'", DateTime("2024-01-01T00:00:00+00:00")),
        ("'2024-01-01 00:00:00.4+00'", DateTime("2024-01-01T00:00:00.4+00:00")),
        ("'2024-01-01 00:00:00.6+00'", DateTime("2024-01-01T00:00:00.6+00:00")),
    ],
    "timestamp": [
        ("'2024-01-01 00:00'", DateTime("2024-01-01T00:00:00")),
        ("'2024-01-01 00:00:01'", DateTime("2024-01-01T00:00:01")),
        ("'-infinity'", "-infinity"),
    ],
}  # fmt: skip
TYPES = [*VALUES, "int", "int", "int", "text", "text", "bigint"]


class Query(msgspec.Struct):
    """A statement and its arguments by name."""

    sql: str
    args: dict[str, Any]


class Step(msgspec.Struct):
    """Statements of one transaction. `late` ones run in a transaction that begins before it and commits after it."""

    statements: list[str]
    late: list[str] = []
    own: bool = False  # through our writer
    is_schema: bool = False


class TableSpec(msgspec.Struct):
    """A table, and its columns with their types."""

    name: str
    columns: list[tuple[str, str]]
    key: list[str]


class World:
    """One random schema; its names begin with `prefix`, so that many fit into one database."""

    def __init__(self, seed: int, prefix: str) -> None:
        self.random = random.Random(f"pg {seed}")
        self.prefix = prefix
        self._args: dict[str, Any] = {}
        self._serial = 0
        self.setup: list[str] = []
        self.tables = [self._table(f"{prefix}t{place}") for place in range(self.pick([1, 2, 2, 3]))]
        self.views: list[TableSpec] = []
        self._made: list[tuple[str, TableSpec]] = []
        for table in self.tables:
            self.setup += [self._insert(table, key=place) for place in range(self.random.randint(3, 7))]
        for place in range(self.pick([0, 1, 1])):
            columns = [(f"c{n}", kind) for n, (_, kind) in enumerate(self._view_columns())]
            self.views.append(TableSpec(f"{prefix}v{place}", columns, []))

    def pick(self, options: Any) -> Any:
        return options[self.random.randrange(len(options))]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # --- tables ----------------------------------------------------------------------------------------------

    def _table(self, name: str) -> TableSpec:
        columns = [(letter, self.pick(TYPES)) for letter in "abcd"[: self.pick([2, 3, 3, 4])]]
        key, kind = ["k"], self.random.random()
        parts = [f"{column} {type_}" for column, type_ in columns]
        if kind < 0.1:
            key, tail = [], ""
        elif kind < 0.2:
            key, tail = ["k", "k2"], ", PRIMARY KEY (k, k2)"
            parts.insert(0, "k2 int NOT NULL DEFAULT 0")
            columns = [("k2", "int"), *columns]
        else:
            tail = ", PRIMARY KEY (k)"
        parted = kind >= 0.2 and self.chance(0.12)
        more = " PARTITION BY RANGE (k)" if parted else ""
        self.setup.append(f"CREATE TABLE {name}(k int, {', '.join(parts)}{tail}){more}")
        leaves = [name]
        if parted:
            leaves = [f"{name}_lo", f"{name}_hi"]
            self.setup.append(f"CREATE TABLE {leaves[0]} PARTITION OF {name} FOR VALUES FROM (MINVALUE) TO (4)")
            self.setup.append(f"CREATE TABLE {leaves[1]} PARTITION OF {name} FOR VALUES FROM (4) TO (MAXVALUE)")
        for leaf in leaves:
            if not key or self.chance(0.4):
                self.setup.append(f"ALTER TABLE {leaf} REPLICA IDENTITY FULL")
        return TableSpec(name, [("k", "int"), *columns], key)

    def _view_columns(self) -> list[tuple[str, str]]:
        table = self.pick(self.tables)
        columns = [self.pick(table.columns) for _ in range(2)]
        listed = ", ".join(f"{name} AS c{n}" for n, (name, _) in enumerate(columns))
        where = f" WHERE {self._simple('', table.columns, bare=True)}" if self.chance(0.5) else ""
        made = f"VIEW {self.prefix}v{len(self.views)} AS SELECT {listed} FROM {table.name}"
        self._made.append((made, table))
        self.setup.append(f"CREATE {made}{where}")
        return columns

    # --- expressions -----------------------------------------------------------------------------------------

    def _value(self, kind: str, bare: bool = False) -> str:
        text, value = self.pick(VALUES[kind])
        if self.chance(0.08):
            text, value = "NULL", None
        if not bare and self._by_argument and self.chance(0.5):
            self._args[str(len(self._args) + 1)] = value
            return f"${len(self._args)}::{kind.split('(')[0]}" if self.chance(0.3) else f"${len(self._args)}"
        return f"{text}::{kind.split('(')[0]}" if self.chance(0.2) and not bare else text

    _by_argument = False

    def _simple(self, alias: str, columns: list[tuple[str, str]], bare: bool = False) -> str:
        name, kind = self.pick(columns)
        column = f"{alias}{name}"
        roll = self.random.random()
        if roll < 0.12:
            return f"{column} IS {self.pick(['', 'NOT '])}NULL"
        if roll < 0.28:
            return f"{column} IN ({', '.join(self._value(kind, bare) for _ in range(self.pick([1, 2, 2])))})"
        if kind == "bool" and roll < 0.5:
            return self.pick([column, f"NOT {column}"])
        if roll < 0.36:
            return f"{column} BETWEEN {self._value(kind, bare)} AND {self._value(kind, bare)}"
        op = self.pick(["=", "=", "=", "=", "<", "<=", ">", ">=", "<>"])
        left, right = column, self._value(kind, bare)
        return f"{right} {op} {left}" if self.chance(0.15) else f"{left} {op} {right}"

    def _pred(self, sources: list[tuple[str, TableSpec]], depth: int) -> str:
        alias, table = self.pick(sources)
        roll = self.random.random()
        if roll < 0.1 and len(sources) > 1:
            (one, left), (two, right) = self.random.sample(sources, 2)
            pairs = [(a, b) for a, x in left.columns for b, y in right.columns if x == y]
            if pairs:
                a, b = self.pick(pairs)
                return f"{one}.{a} = {two}.{b}"
        if roll < 0.2:
            return f"({self._pred(sources, depth)} {self.pick(['OR', 'OR', 'AND'])} {self._pred(sources, depth)})"
        if roll < 0.25:
            return f"NOT ({self._pred(sources, depth)})"
        if roll < 0.35 and depth:
            inner = self.pick(self.tables)
            link = f"z.k = {alias}.k" if any(name == "k" for name, _ in table.columns) else "true"
            where = f"{link} AND {self._simple('z.', inner.columns)}"
            if self.chance(0.6) or link == "true":
                return f"{self.pick(['', 'NOT '])}EXISTS (SELECT 1 FROM {inner.name} z WHERE {where})"
            inside = f"SELECT z.k FROM {inner.name} z WHERE {self._simple('z.', inner.columns)}"
            return f"{alias}.k {self.pick(['', 'NOT '])}IN ({inside})"
        ints = [name for name, kind in table.columns if kind in ("int", "bigint")]
        if roll < 0.38 and ints:
            return self.pick([f"10 / {alias}.{self.pick(ints)} > 1", f"{alias}.{self.pick(ints)} + 1 > 1"])
        texts = [name for name, kind in table.columns if kind == "text"]
        if roll < 0.41 and texts:
            return f"{alias}.{self.pick(texts)} {self.pick(['LIKE', 'ILIKE'])} 'a%'"
        return self._simple(f"{alias}.", table.columns)

    # --- queries ---------------------------------------------------------------------------------------------

    def queries(self, count: int) -> list[Query]:
        """Return `count` queries."""
        return [self.query() for _ in range(count)]

    def query(self) -> Query:
        """Return a random query."""
        self._args, self._by_argument = {}, self.chance(0.5)
        roll = self.random.random()
        if roll < 0.08:
            one, two = self._flat(), self._flat()
            sql = f"{one} {self.pick(['UNION', 'UNION ALL', 'INTERSECT', 'EXCEPT'])} {two}"
            sql += self.pick(["", " ORDER BY 1"])
        elif roll < 0.16:
            sql = f"WITH w AS ({self._select(0)}) SELECT * FROM w{self.pick(['', ' ORDER BY 1'])}"
        elif roll < 0.24:
            sql = f"SELECT count(*) FROM ({self._select(0)}) s"
        else:
            sql = self._select(1)
        self._by_argument = False
        return Query(sql, self._args)

    def _flat(self) -> str:
        table = self.pick(self.tables)
        return f"SELECT k FROM {table.name} x WHERE {self._simple('x.', table.columns)}"

    def _from(self) -> tuple[str, list[tuple[str, TableSpec]]]:
        sources = [("x", self.pick([*self.tables, *self.tables, *self.views]))]
        text = f"{sources[0][1].name} x"
        while len(sources) < 3 and self.chance(0.35):
            alias = "xyz"[len(sources)]
            other = self.pick([*self.tables, *self.tables, *self.views])
            how = self.pick(["JOIN", "JOIN", "LEFT JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"])
            pairs = [(a, b) for a, s in sources[0][1].columns for b, t in other.columns if s == t]
            if not pairs:
                text += f" CROSS JOIN {other.name} {alias}"
            else:
                a, b = self.pick(pairs)
                is_more = self.chance(0.35) and how != "FULL JOIN"
                side, of = self.pick([(alias, other), sources[0]])
                extra = f" AND {self._simple(f'{side}.', of.columns)}" if is_more else ""
                text += f" {how} {other.name} {alias} ON x.{a} = {alias}.{b}{extra}"
            sources.append((alias, other))
        return text, sources

    def _select(self, depth: int) -> str:
        text, sources = self._from()
        where = ""
        if self.chance(0.75):
            where = " WHERE " + " AND ".join(self._pred(sources, depth) for _ in range(self.pick([1, 1, 1, 2])))
        columns = [f"{alias}.{name}" for alias, table in sources for name, _ in table.columns]
        shown = [self.pick(columns) for _ in range(self.pick([1, 2, 2, 3]))]
        listed = ", ".join(f"{column} AS o{n}" for n, column in enumerate(shown))
        roll = self.random.random()
        if roll < 0.13:
            tail = f" ORDER BY {shown[0]}" if self.chance(0.6) else ""
            having = " HAVING count(*) > 1" if self.chance(0.2) else ""
            return f"SELECT {shown[0]} AS g, count(*) AS n FROM {text}{where} GROUP BY {shown[0]}{having}{tail}"
        if roll < 0.25:
            summed = ("int", "numeric(6,2)", "double precision")
            ints = [f"{a}.{n}" for a, t in sources for n, kind in t.columns if kind in summed]
            call = self.pick(["count(*)", f"count({shown[0]})", f"count(DISTINCT {shown[0]})"])
            call = f"sum({self.pick(ints)})" if ints and self.chance(0.4) else call
            return f"SELECT {call} AS n FROM {text}{where}"
        if roll < 0.31:
            return f"SELECT DISTINCT {listed} FROM {text}{where}{' ORDER BY 1' if self.chance(0.4) else ''}"
        if roll < 0.36 and sources[0][1] in self.tables:
            return f"SELECT {listed}, rank() OVER (ORDER BY x.k) AS r FROM {text}{where}"
        if roll < 0.4 and len(sources) == 1:
            return f"SELECT x AS whole FROM {text}{where}"
        if roll < 0.46 and len(sources) == 1:
            listed = "*"
        tail = ""
        if self.chance(0.5):
            by = [f"{self.pick(columns)}{self.pick(['', ' DESC'])}" for _ in range(self.pick([1, 2]))]
            tail = " ORDER BY " + ", ".join(by)
            if self.chance(0.5):
                tail += "".join(f", {alias}.{name}" for alias, table in sources for name in table.key)
        if self.chance(0.2):
            tail += f" LIMIT {self.random.randint(1, 3)}"
        return f"SELECT {listed} FROM {text}{where}{tail}"

    # --- writes ----------------------------------------------------------------------------------------------

    def _insert(self, table: TableSpec, key: int | None = None) -> str:
        values = [str(self.random.randint(0, 12) if key is None else key)]
        values += [self._value(kind, bare=True).replace("NULL", "0") if name == "k2" else self._value(kind, bare=True)
                   for name, kind in table.columns[1:]]  # fmt: skip
        names = ", ".join(name for name, _ in table.columns)
        return f"INSERT INTO {table.name}({names}) VALUES ({', '.join(values)}) ON CONFLICT DO NOTHING"

    def write(self) -> str:
        """Return one statement that may change rows."""
        table, roll = self.pick(self.tables), self.random.random()
        where = f"k = {self.random.randint(0, 7)}" if self.chance(0.7) else self._simple("", table.columns, bare=True)
        if roll < 0.3:
            return self._insert(table)
        if roll < 0.45:
            return f"DELETE FROM {table.name} WHERE {where}"
        if roll < 0.52:
            return f"UPDATE {table.name} SET k = k + 20 WHERE {where}"
        if roll < 0.55:
            return f"TRUNCATE {table.name}"
        names = [(name, kind) for name, kind in table.columns[1:] if name != "k2"]
        pairs = self.random.sample(names, 1 if self.chance(0.7) or len(names) < 2 else 2)
        set_ = ", ".join(f"{name} = {self._value(kind, bare=True)}" for name, kind in pairs)
        return f"UPDATE {table.name} SET {set_} WHERE {where}"

    def steps(self, count: int) -> Iterator[Step]:
        """Yield `count` steps."""
        return (self.step() for _ in range(count))

    def step(self) -> Step:
        """Return one transaction, perhaps with a late one, or a change of the schema."""
        roll = self.random.random()
        if roll < 0.1:
            return Step([self._schema_change()], is_schema=True)
        statements = [self.write() for _ in range(self.pick([1, 1, 1, 2, 3]))]
        # One that is open and truncates would keep everybody from reading.
        late = [self.write().replace("TRUNCATE", "DELETE FROM")] if roll < 0.25 else []
        return Step(statements, late, own=not late and self.chance(0.3))

    def _schema_change(self) -> str:
        self._serial += 1
        table, roll = self.pick(self.tables), self.random.random()
        name, _ = self.pick(table.columns[1:])
        if roll < 0.2:
            return f"ALTER TABLE {table.name} ADD COLUMN n{self._serial} int DEFAULT {self._serial}"
        if roll < 0.4 and self._made:
            made, of = self.pick(self._made)
            return f"CREATE OR REPLACE {made} WHERE {self._simple('', of.columns, bare=True)}"
        if roll < 0.6:
            return f"CREATE INDEX ON {table.name}({name})"
        if roll < 0.75:
            return f"ALTER TABLE {table.name} REPLICA IDENTITY {self.pick(['FULL', 'DEFAULT'])}"
        if roll < 0.85:
            return f"ANALYZE {table.name}"
        return f"ALTER TABLE {table.name} RENAME COLUMN {name} TO {name}x{self._serial}"


class ByHand(World):
    """A world written by hand: a table `t`, perhaps `u`, one query, and one write after another."""

    def __init__(self, prefix: str, setup: list[str], query: str, writes: list[str]) -> None:
        self.prefix = prefix
        self.setup = [self._named(sql) for sql in setup]
        self.tables = [TableSpec(f"{prefix}{name}", [], []) for name in "tu"]
        self._query, self._writes = Query(self._named(query), {}), [Step([self._named(sql)]) for sql in writes]

    def _named(self, sql: str) -> str:
        return sql.replace(" t ", f" {self.prefix}t ").replace(" u ", f" {self.prefix}u ")

    def queries(self, count: int) -> list[Query]:
        return [self._query]

    def steps(self, count: int) -> Iterator[Step]:
        return iter(self._writes)
