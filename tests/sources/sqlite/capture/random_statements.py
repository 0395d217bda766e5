"""Random tables and statements, the same for the same seed: few values, so that keys collide."""

from __future__ import annotations

from random import Random

VALUES = ["NULL", "0", "1", "2", "3", "1.0", "2.5", "'a'", "'A'", "'a '", "'b'", "'1'", "x'61'", "''", "-1"]
TYPES = ["", "INTEGER", "TEXT", "REAL", "BLOB", "NUMERIC", "DECIMAL_TEXT", "JSON", "BOOLEAN"]
COLLATIONS = ["", "", "", " COLLATE NOCASE", " COLLATE RTRIM"]
CLAUSES = ["", "", "OR REPLACE", "OR REPLACE", "OR IGNORE", "OR FAIL", "OR ABORT"]
GENERATED = ["coalesce(a, 0) + 1", "b || c", "typeof(b) || typeof(d)", "length(c) + (d IS NULL)", "a % 3"]
GENERATED_RULES = ["UNIQUE", "STORED UNIQUE", "UNIQUE ON CONFLICT REPLACE", "STORED UNIQUE ON CONFLICT REPLACE"]
COLUMNS = ("a", "b", "c", "d")


class RandomTable:
    """One random table: statements that create it, and statements on it."""

    def __init__(self, random: Random, name: str) -> None:
        self.random, self.name, self.names = random, name, (name,)
        self.rowid = True
        self.numbered = False  # whether SQLite numbers rows that are inserted without a key
        self.explicit_rowid = False  # whether a statement named the rowid though there is a key
        self.create = [self._table(), *self._indexes(), *self._triggers()]

    def _column(self, name: str) -> str:
        r = self.random
        unique = r.choice(["", "", "", " UNIQUE", " UNIQUE ON CONFLICT REPLACE", " NOT NULL"])
        return f"{name} {r.choice(TYPES)}{r.choice(COLLATIONS)}{unique}"

    def _table(self) -> str:
        r = self.random
        columns = {name: self._column(name) for name in COLUMNS}
        kind = r.choice(["integer", "lone", "lone", "composite", "composite", "none"])
        rules = []
        if kind == "integer":
            self.numbered = True
            columns["a"] = "a INTEGER PRIMARY KEY" + r.choice(["", "", " ON CONFLICT REPLACE", " AUTOINCREMENT"])
        elif kind == "lone":
            columns["b"] = f"b {r.choice(TYPES)}{r.choice(COLLATIONS)} PRIMARY KEY"
        elif kind == "composite":
            rules.append(r.choice(["PRIMARY KEY (b, a)", "PRIMARY KEY (c, b)", "PRIMARY KEY (a, b, c)"]))
        if r.random() < 0.2:
            rules.append("UNIQUE (b, d)")
        if r.random() < 0.25:
            columns["g"] = f"g AS ({r.choice(GENERATED)}) {r.choice(['STORED', 'VIRTUAL', *GENERATED_RULES])}"
        without = kind not in ("none",) and "AUTOINCREMENT" not in columns["a"] and r.random() < 0.3
        self.rowid, self.numbered = not without, self.numbered and not without
        text = f"CREATE TABLE {self.name}({', '.join([*columns.values(), *rules])})"
        return text + (" WITHOUT ROWID" if without else "")

    def _indexes(self) -> list[str]:
        terms = [
            "lower(d)",
            "d || c",
            "d COLLATE NOCASE",
            "c DESC",
            "d) WHERE (a IS NOT NULL",
            "b, c) WHERE (d > 1",
            "a % 3",
            "d = '1', b",
            "c > 1, b",
        ]
        count = self.random.choice([0, 0, 0, 1, 2])
        return [
            f"CREATE UNIQUE INDEX {self.name}_{n} ON {self.name}({self.random.choice(terms)})" for n in range(count)
        ]

    def _triggers(self) -> list[str]:
        if self.random.random() > 0.15:
            return []
        row = "rowid = NEW.rowid" if self.rowid else "a IS NEW.a AND b IS NEW.b AND c IS NEW.c"
        return [
            f"CREATE TRIGGER {self.name}_t AFTER {self.random.choice(['INSERT', 'UPDATE OF c'])} ON {self.name} "
            f"BEGIN UPDATE OR IGNORE {self.name} SET d = coalesce(d, '') || '+' WHERE {row} AND length(d) < 4; END"
        ]

    def statement(self) -> str:
        """Return one statement, which may fail."""
        r = self.random
        return r.choice([self._insert, self._insert, self._insert, self._update, self._update, self._delete])()

    def _value(self) -> str:
        return self.random.choice(VALUES)

    def _row(self) -> str:
        return f"({', '.join(self._value() for _ in COLUMNS)})"

    def _where(self) -> str:
        r = self.random
        if r.random() < 0.1:
            return ""
        return f" WHERE {r.choice(COLUMNS)} {r.choice(['IS', 'IS', '>', '<'])} {self._value()}"

    def _insert(self) -> str:
        r = self.random
        rows = ", ".join(self._row() for _ in range(r.choice([1, 1, 2, 4])))
        if r.random() < 0.15:
            then = r.choice(["NOTHING", f"UPDATE SET {self._assign()}", f"UPDATE SET {self._assign()}"])
            return f"INSERT INTO {self.name}(a, b, c, d) VALUES {rows} ON CONFLICT DO {then}"
        if self.numbered and r.random() < 0.3:
            values = ", ".join(self._value() for _ in "bcd")
            return f"INSERT {r.choice(CLAUSES)} INTO {self.name}(b, c, d) VALUES ({values}), ({values})"
        if self.rowid and r.random() < 0.1:
            self.explicit_rowid = "PRIMARY KEY" in self.create[0]
            return (
                f"INSERT {r.choice(CLAUSES)} INTO {self.name}(rowid, c, d) VALUES (1, {self._value()}, {self._value()})"
            )
        return f"INSERT {r.choice(CLAUSES)} INTO {self.name}(a, b, c, d) VALUES {rows}"

    def _assign(self) -> str:
        names = self.random.sample(COLUMNS, self.random.choice([1, 1, 2, 3]))
        return ", ".join(f"{name} = {self.random.choice([self._value(), 'a', 'b', 'd'])}" for name in names)

    def _update(self) -> str:
        return f"UPDATE {self.random.choice(CLAUSES)} {self.name} SET {self._assign()}{self._where()}"

    def _delete(self) -> str:
        return f"DELETE FROM {self.name}{self._where()}"

    def transaction(self) -> list[str]:
        """Return the statements of one foreign transaction with savepoints; the last ends it."""
        r = self.random
        steps, open_savepoints = ["BEGIN"], 0
        for _ in range(r.choice([1, 2, 5])):
            steps.append(self.statement())
            turn = r.random()
            if turn < 0.2:
                steps.append("SAVEPOINT s")
                open_savepoints += 1
            elif turn < 0.4 and open_savepoints:
                steps += r.choice([["ROLLBACK TO s"], ["RELEASE s"], ["ROLLBACK TO s", "RELEASE s"]])
                open_savepoints -= steps[-1] == "RELEASE s"
        return [*steps, r.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"])]


ACTIONS = ["CASCADE", "CASCADE", "SET NULL", "NO ACTION"]


class RandomFamily(RandomTable):
    """A table that references itself, and a child with a trigger that writes to it."""

    def __init__(self, random: Random, name: str) -> None:
        super().__init__(random, name)
        self.child = f"{name}_c"
        self.names = (name, self.child)
        key = random.choice(["INTEGER PRIMARY KEY", "INTEGER PRIMARY KEY", "INT PRIMARY KEY NOT NULL"])
        self.create = [
            f"CREATE TABLE {name}(id {key}, u{random.choice(['', ' UNIQUE', ' UNIQUE'])}, v, parent{self._refers()})"
            + random.choice(["", "", " WITHOUT ROWID"]),
            f"CREATE TABLE {self.child}(id INTEGER PRIMARY KEY, p{self._refers()})",
            f"CREATE TRIGGER {name}_t AFTER {random.choice(['DELETE', 'DELETE', 'UPDATE'])} ON {self.child} "
            f"BEGIN {self._nested()}; END",
        ]

    def _refers(self) -> str:
        r = self.random
        return f" REFERENCES {self.name}(id) ON DELETE {r.choice(ACTIONS)} ON UPDATE {r.choice(ACTIONS)}"

    def _nested(self) -> str:
        return self.random.choice(
            [
                f"INSERT OR REPLACE INTO {self.name} VALUES (9, 9, OLD.id, NULL)",
                f"INSERT OR IGNORE INTO {self.name} VALUES (8, 1, OLD.id, NULL)",
                f"UPDATE {self.name} SET v = coalesce(v, 0) + 1 WHERE id = OLD.p",
                f"UPDATE {self.name} SET v = coalesce(v, 0) + 1 WHERE u = 1",
                f"DELETE FROM {self.name} WHERE u = 2",
            ]
        )

    def _value(self) -> str:
        return self.random.choice("1234")

    def statement(self) -> str:
        """Return one statement, which may fail."""
        r = self.random
        return r.choice([self._fill, self._fill, self._insert, self._update, self._update, self._delete])()

    def _fill(self) -> str:
        if self.random.random() < 0.5:
            return f"INSERT OR IGNORE INTO {self.child} VALUES (1, 1), (2, 2), (3, 2), (4, 4)"
        v = self.random.randrange(10**6)  # the order of two equal rows of one key cannot be recovered
        rows = f"(1, 1, {v}, NULL), (2, 2, {v}, 1), (3, 3, {v}, 3), (4, 4, {v}, 1)"
        return f"INSERT OR IGNORE INTO {self.name} VALUES {rows}"

    def _insert(self) -> str:
        v = self.random.randrange(10**6)
        return f"INSERT OR REPLACE INTO {self.name} VALUES ({self._value()}, {self._value()}, {v}, NULL)"

    def _update(self) -> str:
        r = self.random
        column = r.choice(["id", "id", "id", "u", "parent"])
        verb = r.choice(["UPDATE", "UPDATE OR REPLACE", "UPDATE OR REPLACE"])
        return f"{verb} {self.name} SET {column} = {r.choice('12345')} WHERE id = {self._value()}"

    def _delete(self) -> str:
        return f"DELETE FROM {self.random.choice(self.names)} WHERE id = {self._value()}"
