"""Parser of queries in the JSON form; errors have the path of the fault.

    {"body": {"select": {"projection": [{"expr": {"col": "id"}}], "from": [{"table": "users"}]}}}

All names, values and functions of the form are checked here, and a source generates SQL from the result alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.errors import NotSupported
from headwater.model.database_name import real_name
from headwater.model.literal import I64_MAX, Json
from headwater.model.predicate import (
    FUNCTIONS,
    MANY,
    Call,
    Col,
    Expr,
    ExprReader,
    Function,
    Literal,
    bad,
    check_count,
    check_fields,
    field,
)
from headwater.model.query import query as tree

MAX_PARAMETERS = 999
LOCKS = ("none", "for_update", "for_share")
AGGREGATES: dict[str, tuple[int, int]] = {  # name -> fewest and most arguments
    **dict.fromkeys(("sum", "avg", "total", "min", "max"), (1, 1)),
    "count": (0, 1),
    "group_concat": (1, 2),
}
QUERY_FUNCTIONS = FUNCTIONS | {
    **dict.fromkeys(("floor", "ceil", "sqrt", "exp", "ln"), (1, 1)),
    "power": (2, 2),
    "concat": (1, MANY),
    "concat_ws": (2, MANY),
    "format": (1, MANY),
    "json_extract": (2, MANY),
    **dict.fromkeys(("json_array_length", "json_type"), (1, 2)),
}
STAR = "*"


def parse_query_of(body: Any, *, db: str | None = None, path: str = "query") -> tuple[tree.Query, str]:
    """Return the query that the JSON `body` describes, and its database: `db`, else that of its tables, else `main`.

    Raise InvalidRequest or NotSupported with the path of the fault.
    """
    reader = _QueryReader(None if db is None else real_name(db))
    query = reader.query(body, path, 1)
    parameters = tuple(str(place + 1) for place in range(reader.parameters))
    return msgspec.structs.replace(query, parameters=parameters), reader.db or real_name(None)


def _object(body: Any, path: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return `body` if it has these fields; an optional field that is null counts as absent."""
    if not isinstance(body, dict):
        raise bad(path, "an object was expected")
    check_fields(body, path, required, optional)
    return {name: value for name, value in body.items() if value is not None or name in required}


def _one_of(body: dict[str, Any], name: str, words: Sequence[str], path: str) -> str:
    word = field(body, name, str, path)
    if word not in words:
        raise bad(f"{path}.{name}", f"one of {', '.join(words)} was expected, not {word[:40]!r}")
    return str(word)


class _QueryReader(ExprReader):
    """Parses queries, including expressions that are not allowed in a condition on one row."""

    def __init__(self, db: str | None) -> None:
        super().__init__(())
        self.db = db  # None until a table names it
        self.parameters = 0
        self.characters = 0  # of names and values: the SQL has at least as many
        self.forms |= {"subquery": self.subquery, "exists": self.exists}
        self.tables: dict[str, Callable[[dict[str, Any], str, int], tree.TableRef]] = {
            "table": self.named,
            "join": self.join,
            "subquery": self.derived,
        }

    # The query and its body

    def query(self, body: Any, path: str, depth: int) -> tree.Query:
        self.enter(path, depth)
        body = _object(body, path, ["body"], ["with", "order_by", "limit", "lock"])
        if "lock" in body and _one_of(body, "lock", LOCKS, path) != "none":
            raise NotSupported(
                f"{path}.lock: a query cannot lock rows", hint="Omit it, or use a transaction (tx.begin)."
            )
        limit, offset = self.limits(body, path, depth)
        return tree.Query(
            self.body(body["body"], f"{path}.body", depth + 1),
            tuple(self.each(body, "with", path, depth, self.with_name)),
            tuple(self.each(body, "order_by", path, depth, self.order)),
            limit,
            offset,
        )

    def each(
        self, body: dict[str, Any], name: str, path: str, depth: int, read: Callable[[Any, str, int], Any]
    ) -> list[Any]:
        """Parse each entry of the list in the field `name` by `read`; an absent list is empty."""
        items = enumerate(field(body, name, list, path) if name in body else ())
        return [read(item, f"{path}.{name}[{place}]", depth + 1) for place, item in items]

    def with_name(self, body: Any, path: str, depth: int) -> tree.With:
        body = _object(body, path, ["name", "query"])
        return tree.With(self.name(body, "name", path), self.query(body["query"], f"{path}.query", depth))

    def order(self, body: Any, path: str, depth: int) -> tree.Order:
        body = _object(body, path, ["expr"], ["dir"])
        descending = "dir" in body and _one_of(body, "dir", ("asc", "desc"), path) == "desc"
        return tree.Order(self.varying(body["expr"], f"{path}.expr", depth), descending)

    def varying(self, body: Any, path: str, depth: int) -> Expr:
        """Parse an expression to sort or group by; a constant is rejected, because SQL would take it for a column."""
        found = self.read(body, path, depth)
        bare = found
        while isinstance(bare, Call) and len(bare.args) == 1 and bare.op in ("and", "or"):
            bare = bare.args[0]  # SQL takes a number in brackets for a column, too
        if isinstance(bare, Literal | tree.Param):
            raise bad(path, "a constant neither sorts nor groups", "Send a column, or the `as` of one.")
        return found

    def limits(self, body: dict[str, Any], path: str, depth: int) -> tuple[Expr | None, Expr | None]:
        if "limit" not in body:
            return None, None
        found, path = _object(body["limit"], f"{path}.limit", [], ["limit", "offset"]), f"{path}.limit"
        limit, offset = (self.number(found, name, path, depth) for name in ("limit", "offset"))
        return limit, offset

    def number(self, body: dict[str, Any], name: str, path: str, depth: int) -> Expr | None:
        """Parse a number of rows: a number, or a param or literal."""
        if name not in body:
            return None
        given = body[name]
        found = self.read(given if isinstance(given, dict) else {"lit": given}, f"{path}.{name}", depth)
        if isinstance(found, tree.Param):
            return found
        value = found.value if isinstance(found, Literal) else None
        count = getattr(value, "v", value)  # a u64 is accepted like an i64
        if type(count) is not int or not 0 <= count <= I64_MAX:
            raise bad(f"{path}.{name}", "a count of rows was expected: 0 or more, or a param")
        return Literal(count)

    def body(self, body: Any, path: str, depth: int) -> tree.Body:
        self.enter(path, depth)
        body = _object(body, path, [], ["select", "setop"])
        if len(body) != 1:
            raise bad(path, "an object with either select or setop was expected")
        if "select" in body:
            return self.select(body["select"], f"{path}.select", depth)
        return self.set_op(body["setop"], f"{path}.setop", depth)

    def set_op(self, body: Any, path: str, depth: int) -> tree.Body:
        body = _object(body, path, ["kind", "left", "right"], ["all"])
        kind = _one_of(body, "kind", tree.SET_OPS, path)
        every = "all" in body and field(body, "all", bool, path)
        left = self.body(body["left"], f"{path}.left", depth + 1)
        return tree.SetOp(kind, every, left, self.body(body["right"], f"{path}.right", depth + 1))

    def select(self, body: Any, path: str, depth: int) -> tree.Body:
        body = _object(body, path, ["projection"], ["distinct", "from", "where", "group_by", "having"])
        items = tuple(self.each(body, "projection", path, depth, self.item))
        if not items:
            raise bad(f"{path}.projection", "at least one column was expected")
        return tree.Select(
            items,
            tuple(self.each(body, "from", path, depth, self.table)),
            self.maybe(body, "where", path, depth),
            tuple(self.each(body, "group_by", path, depth, self.varying)),
            self.maybe(body, "having", path, depth),
            "distinct" in body and field(body, "distinct", bool, path),
        )

    def maybe(self, body: dict[str, Any], name: str, path: str, depth: int) -> Expr | None:
        return self.read(body[name], f"{path}.{name}", depth + 1) if name in body else None

    def item(self, body: Any, path: str, depth: int) -> tree.Item:
        body = _object(body, path, ["expr"], ["as"])
        alias = self.name(body, "as", path) if "as" in body else None
        star = self.star(body["expr"], f"{path}.expr")
        if star is not None and alias is not None:
            raise bad(path, "all columns cannot have one name")
        return tree.Item(star or self.read(body["expr"], f"{path}.expr", depth), alias)

    def star(self, body: Any, path: str) -> tree.Star | None:
        """Parse `{"col": "*"}`, with or without a table; return None for anything else."""
        if not isinstance(body, dict) or body.get("col") != STAR:
            return None
        body = _object(body, path, ["col"], ["table"])
        return tree.Star(self.name(body, "table", path) if "table" in body else None)

    # Tables

    def table(self, body: Any, path: str, depth: int) -> tree.TableRef:
        self.enter(path, depth)
        forms = [form for form in self.tables if form in body] if isinstance(body, dict) else []
        if len(forms) != 1:
            raise bad(path, f"an object with one of {', '.join(self.tables)} was expected")
        return self.tables[forms[0]](body, path, depth)

    def named(self, body: dict[str, Any], path: str, depth: int) -> tree.TableRef:
        body = _object(body, path, ["table"], ["db", "as"])
        if "db" in body:
            named = real_name(field(body, "db", str, path))
            if self.db is None:
                self.db = named
            if named != self.db:
                raise NotSupported(
                    f"{path}.db: a query can read only one database, and this one reads {self.db!r}",
                    hint="Send one query for each database.",
                )
        return tree.NamedTable(self.name(body, "table", path), self.name(body, "as", path) if "as" in body else None)

    def derived(self, body: dict[str, Any], path: str, depth: int) -> tree.TableRef:
        check_fields(body, path, ["subquery"])
        path = f"{path}.subquery"
        inner = _object(body["subquery"], path, ["query", "as"])
        return tree.Derived(self.query(inner["query"], f"{path}.query", depth + 1), self.name(inner, "as", path))

    def join(self, body: dict[str, Any], path: str, depth: int) -> tree.TableRef:
        check_fields(body, path, ["join"])
        path = f"{path}.join"
        inner = _object(body["join"], path, ["type", "left", "right"], ["on", "using_columns"])
        kind = _one_of(inner, "type", tree.JOINS, path)
        names = self.each(inner, "using_columns", path, depth, self.column_name)
        if ("on" in inner) + bool(names) != (kind != "cross"):
            raise bad(path, "a cross join has no condition, every other one has either `on` or `using_columns`")
        left = self.table(inner["left"], f"{path}.left", depth + 1)
        right = self.table(inner["right"], f"{path}.right", depth + 1)
        return tree.Join(kind, left, right, self.maybe(inner, "on", path, depth), tuple(names))

    # Names and values

    def count(self, size: int) -> None:
        """Count characters that the SQL will have; InvalidRequest if it becomes too long."""
        self.characters += size
        tree.check_length(self.characters)

    def name(self, body: dict[str, Any], name: str, path: str) -> str:
        """Return a field that is the name of an object in the database."""
        text: str = field(body, name, str, path)
        return self.check_name(text, f"{path}.{name}")

    def column_name(self, body: Any, path: str, depth: int) -> str:
        """Parse the name of a column."""
        if not isinstance(body, str):
            raise bad(path, "a string was expected")
        return self.check_name(body, path)

    def check_name(self, text: str, path: str) -> str:
        """Return a name; InvalidRequest if no object can have it."""
        self.count(len(text))
        if not text or "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise bad(path, "a name was expected: not empty, without NUL, in Unicode")
        return text

    def lit(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        found = super().lit(body, path, depth)
        value = found.value if isinstance(found, Literal) else None
        text = value.text if isinstance(value, Json) else value
        self.count(len(text) if isinstance(text, str | bytes) else 0)
        return found

    # Expressions

    def col(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a column, with or without its table."""
        body = _object(body, path, ["col"], ["table"])
        if body["col"] == STAR:
            raise bad(path, "`*` is allowed only in a projection and in count")
        return Col(self.name(body, "col", path), self.name(body, "table", path) if "table" in body else None)

    def param(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a parameter, whose argument is bound later."""
        check_fields(body, path, ["param"])
        place = field(body, "param", int, path)
        if not 0 <= place < MAX_PARAMETERS:
            raise bad(path, f"params are counted from 0 to {MAX_PARAMETERS - 1}")
        self.parameters = max(self.parameters, place + 1)
        return tree.Param(place)

    def op(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse an operator; `in` has a list, or a subquery as `b`."""
        if body.get("op") != "in":
            return super().op(body, path, depth)
        if "b" not in body:
            found = super().op(body, path, depth)
            if any(isinstance(item, dict) and "subquery" in item for item in body["list"]):
                raise bad(f"{path}.list", "a subquery here would be one value", "Send it as `b` to use all its rows.")
            return found
        check_fields(body, path, ["op", "a", "b"])
        expr = self.read(body["a"], f"{path}.a", depth + 1)
        rows = self.read(body["b"], f"{path}.b", depth + 1)
        if not isinstance(rows, tree.Subquery):
            raise bad(f"{path}.b", "a subquery was expected", "Send values in `list`.")
        return tree.InQuery(expr, rows.query)

    def function(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a call of a scalar function or of an aggregate."""
        body = _object(body, path, ["fn"], ["args", "distinct"])
        name = field(body, "fn", str, path).lower()
        distinct = "distinct" in body and field(body, "distinct", bool, path)
        given = field(body, "args", list, path) if "args" in body else []
        if name == "count" and len(given) == 1 and self.star(given[0], f"{path}.args[0]") == tree.Star():
            given = []
        args = self.many({"args": given}, "args", path, depth)
        if name in AGGREGATES and (name not in FUNCTIONS or len(args) < 2):  # min and max of many are scalar
            return _aggregate(name, args, distinct, path)
        if name not in QUERY_FUNCTIONS:
            known = ", ".join(sorted({*QUERY_FUNCTIONS, *AGGREGATES}))
            raise NotSupported(f"{path}: function {name[:40]!r} is not supported", hint=f"Supported are {known}.")
        if distinct:
            raise bad(f"{path}.distinct", "only an aggregate can be distinct")
        check_count(name, QUERY_FUNCTIONS[name], len(args), path)
        return Function(name, args)

    def subquery(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a subquery used as a value."""
        check_fields(body, path, ["subquery"])
        path = f"{path}.subquery"
        inner = _object(body["subquery"], path, ["query"])
        return tree.Subquery(self.query(inner["query"], f"{path}.query", depth + 1))

    def exists(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse an EXISTS test."""
        check_fields(body, path, ["exists"])
        path = f"{path}.exists"
        inner = _object(body["exists"], path, ["query"], ["negated"])
        negated = "negated" in inner and field(inner, "negated", bool, path)
        return tree.Exists(self.query(inner["query"], f"{path}.query", depth + 1), negated)


def _aggregate(name: str, args: tuple[Expr, ...], distinct: bool, path: str) -> Expr:
    check_count(name, AGGREGATES[name], len(args), path)
    if distinct and len(args) != 1:
        raise bad(f"{path}.distinct", "exactly one argument can be distinct")
    return tree.Aggregate(name, args, distinct)
