"""Random tables, rows and predicates for comparing our answers with SQLite's own. Everything follows from a seed."""

from __future__ import annotations

import random
from typing import Any

import apsw

from headwater.model.table import Column, Row, Table
from headwater.sources.sqlite.types import FROM_STORED, kind_of

TYPES = [
    "INTEGER",
    "INT",
    "TEXT",
    "REAL",
    "NUMERIC",
    "BLOB",
    "BOOLEAN",
    "DATE",
    "DATETIME",
    "DECIMAL(10,2)",
    "DECIMAL_TEXT",
    "VARCHAR(20)",
    "DOUBLE PRECISION",
    "UNSIGNED BIG INT",
    "JSON_TEXT",
    "UUID_TEXT",
    "CHARINT",
    "FLOATING POINT",
    "",
]
COLLATIONS = ["", "", "", "COLLATE NOCASE", "COLLATE RTRIM", "COLLATE BINARY"]
# A world is made of few families of values that are nearly equal: far ones tell no rule from another.
FAMILIES: list[list[Any]] = [
    [0, 0.0, -0.0, "0", "", "0.0", "-0", b"", False],
    [1, 1.0, "1", "01", " 1", "1 ", "1.0", "+1", "1x", "x1", "\t1", "1e0", b"1", -1, "-1", 2],
    [1000, 1e3, "1e3", "1000", "1000.0", "1e3 ", 999, 1001.5],
    [16, "0x10", "16", 0.5, "0.5", ".5", 5, "5.", "5"],
    [2**53 - 1, 2**53, 2**53 + 1, 9007199254740992.0, "9007199254740993", "9007199254740993.0"],
    [2**63 - 1, 2.0**63, 2**62, "9223372036854775807", "9223372036854775808", "9223372036854775807.0"],
    [-(2**63), -(2.0**63), -(2**63) + 1, "-9223372036854775808", "-9223372036854775809"],
    [float("inf"), float("-inf"), 1e300, 5e-324, "inf", "nan", "1e400", "-1e999", 1e15, 1e16],
    [0.1, 0.30000000000000004, "0.1", "0.30000000000000004", "12.50", 12.5, "12e"],
    ["abc", "ABC", "aBc", "abc ", "ABC  ", "ab", "b", " abc", b"abc", b"ABC", "[", "_", "@"],
    ["a\0b", "a\0c", "A\0b", "A\0cc", "a", "A", "a\0", b"a\0b"],
    ["\u00e9", "\u00c9", "e", "E", "K", "k", "\u212a", "\U0001f600", "\uffff", "\udcff", "a\udc80", b"\xff"],
    ["2024-01-01", "2024-01-01T10:00:00Z", "2024-01-02", b"2024-01-01", 2024, "2024", "2023.5"],
    ['{"a": 1}', '{"a": 2}', "[1, 2]", "true", "null", "it's", "1", 1],
]
COMPARISONS = ["=", "==", "<>", "!=", "<", "<=", ">", ">=", "IS", "IS NOT", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]


class RandomTable:
    """One random table in its own SQLite, its rows, and predicates over it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        families = self.random.sample(FAMILIES, self.random.randint(1, 3))
        self.values = [None, *(value for family in families for value in family)]
        names = ["a", "b", "c", "d"][: self.random.randint(1, 4)]
        declared = [(name, self.pick(TYPES), self.pick(COLLATIONS)) for name in names]
        self.db = apsw.Connection(":memory:")
        self.db.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
        self.db.execute(f"CREATE TABLE t(k INTEGER PRIMARY KEY, {', '.join(' '.join(words) for words in declared)})")
        columns = [
            Column(name, kind_of(type_), type_, collation=collation.removeprefix("COLLATE ") or "BINARY")
            for name, type_, collation in declared
        ]
        self.names = [column.name for column in columns]
        self.table = Table("t", (Column("k", "i64", "INTEGER", auto=True), *columns), ("k",))
        self.given: list[list[Any]] = []  # what was inserted
        self.rows = self._insert(20)

    def pick(self, options: list[Any]) -> Any:
        return options[self.random.randrange(len(options))]

    def _insert(self, count: int) -> list[Row]:
        for _ in range(count):
            values = [self.value() for _ in self.names]
            self.given.append(values)
            marks = ["CAST(? AS TEXT)" if is_broken(value) else "?" for value in values]
            bound = [value.encode("utf-8", "surrogateescape") if is_broken(value) else value for value in values]
            self.db.execute(f"INSERT INTO t({', '.join(self.names)}) VALUES ({', '.join(marks)})", bound)
        cells = [f"CASE typeof({n}) WHEN 'text' THEN CAST({n} AS BLOB) ELSE {n} END, typeof({n})" for n in self.names]
        return [self._decode(row) for row in self.db.execute(f"SELECT k, 0, {', '.join(cells)} FROM t ORDER BY k")]

    def _decode(self, cells: tuple[Any, ...]) -> Row:
        values = []
        for column, cell, kind in zip(self.table.columns, cells[::2], cells[1::2], strict=True):
            value = cell.decode("utf-8", "surrogateescape") if kind == "text" else cell
            values.append(FROM_STORED.get(column.kind, lambda found: found)(value))
        return tuple(values)

    def truth(self, predicate: str) -> list[bool] | None:
        """Return for each row whether SQLite matches it; None if the predicate fails."""
        try:
            found = {k for (k,) in self.db.execute(f"SELECT k FROM t WHERE ({predicate})")}
        except apsw.SQLError:
            return None
        return [row[0] in found for row in self.rows]

    # --- values and literals ---------------------------------------------------------------------------------

    def value(self) -> Any:
        return self.pick(self.values)

    def literal(self) -> str:
        if self.random.random() < 0.1:
            return self.pick(["NULL", "TRUE", "FALSE", "x'616263'", "x''", "0x10", ".5", "5.", "1_000", "+1", "- 1"])
        value = self.value()
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'" if "\0" not in value and not is_broken(value) else "'a'"
        if isinstance(value, bytes):
            return f"x'{value.hex()}'" if self.random.random() < 0.3 else "'abc'"
        return "NULL" if value is None else repr(value).replace("inf", "9e999")

    def column(self) -> str:
        name = self.pick(self.names)
        return self.pick([name, name, name, name.upper(), f'"{name}"', f"[{name}]", f"t.{name}", f"({name})"])

    # --- predicates ------------------------------------------------------------------------------------------

    def predicate(self, depth: int = 2) -> str:
        if depth and self.random.random() < 0.6:
            left, right = self.predicate(depth - 1), self.predicate(depth - 1)
            return self.pick(
                [
                    f"{left} AND {right}",
                    f"{left} OR {right}",
                    f"NOT {left}",
                    f"({left})",
                    f"({left}) AND ({right})",
                    f"({left} OR {right}) AND {left}",
                    f"NOT ({left}) OR ({right})",
                ]
            )
        return self.simple() if self.random.random() < 0.6 else self.odd()

    def simple(self) -> str:
        column, literal = self.column(), self.literal
        few = ", ".join(literal() for _ in range(self.random.randint(1, 4)))
        return self.pick(
            [
                f"{column} {self.pick(COMPARISONS)} {literal()}",
                f"{column} {self.pick(COMPARISONS)} {literal()}",
                f"{literal()} {self.pick(COMPARISONS)} {column}",
                f"{column} IN ({few})",
                f"{column} NOT IN ({few})",
                f"{column} BETWEEN {literal()} AND {literal()}",
                f"{column} NOT BETWEEN {literal()} AND {literal()}",
                f"{column} IS NULL",
                f"{column} IS NOT NULL",
                f"{column} NOTNULL",
                f"{column}",
            ]
        )

    def odd(self) -> str:
        column, other, literal = self.column(), self.column(), self.literal
        return self.pick(
            [
                f"{column} LIKE '{self.pick(['a%', '%B%', '_b_', '1%', '%', 'É'])}'",
                f"{column} NOT LIKE 'a!%%' ESCAPE '!'",
                f"{column} GLOB '{self.pick(['a*', '[aA]?c', '*'])}'",
                f"{column} {self.pick(COMPARISONS)} {other}",
                f"+{column} {self.pick(COMPARISONS)} {literal()}",
                f"{column} + 1 > {literal()}",
                f"{column} || 'x' = {literal()}",
                f"CASE WHEN {column} > {literal()} THEN 1 WHEN {other} IS NULL THEN NULL ELSE '0' END",
                f"CASE {column} WHEN {literal()} THEN 'a' ELSE {other} END = {literal()}",
                f"CAST({column} AS {self.pick(['TEXT', 'INTEGER', 'REAL', 'BLOB', 'NUMERIC'])}) = {literal()}",
                f"length({column}) > 2",
                f"lower({column}) = {literal()}",
                f"coalesce({column}, {literal()}) = {literal()}",
                f"typeof({column}) = 'text'",
                f"max({column}, {literal()}) = {other}",
                f"{column} COLLATE {self.pick(['NOCASE', 'RTRIM', 'BINARY'])} {self.pick(['=', '<'])} {literal()}",
                f"({column}, {other}) {self.pick(['=', '<', '>=', 'IS'])} ({literal()}, {literal()})",
                f"{column} IN ({literal()}, {other})",
                f"{column} IS {self.pick(['TRUE', 'FALSE', 'NOT TRUE', 'NOT FALSE'])}",
                f"{column} IN ()",
                f"-{column} < {literal()}",
                f"{column} & 1",
                f"{column} = {literal()} = {literal()}",
                f"{column} < {literal()} IS NOT NULL",
                f"({column} = {literal()}) IN (0, 1)",
                f"{column} BETWEEN {other} AND {literal()}",
                f"json_extract({column}, '$.a') = 1",
                f"abs({column}) > {literal()}",
                f"NOT {column} IS NULL",
                literal(),
            ]
        )


def is_broken(value: Any) -> bool:
    return isinstance(value, str) and any("\udc80" <= char <= "\udcff" for char in value)
