"""Row filters as data, not SQL text: JSON expressions, parsed, checked and with their parameters bound.

In the Expr of a row filter parameters are Literals already and operators are Calls, so that one match renders it
as SQL or evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import UNAVAILABLE, Value, from_json
from headwater.model.table import Key, Table

MAX_DEPTH = 64
MAX_NODES = 10_000


class Col(msgspec.Struct, frozen=True):
    """A column of the row."""

    name: str
    table: str | None = None


class Literal(msgspec.Struct, frozen=True):
    """A value, bound by the renderer and never written into text."""

    value: Value


class Call(msgspec.Struct, frozen=True):
    """An operator and its operands.

    and or: one or more; not is_null: a; in: a, then the list (may be empty); between: a, low, high;
    all others: a, b. `is` compares like `eq`, with NULL equal to NULL; it is internal, not in the JSON form.
    """

    op: str
    args: tuple[Expr, ...]


class Function(msgspec.Struct, frozen=True):
    """A deterministic scalar function."""

    name: str
    args: tuple[Expr, ...]


class Cast(msgspec.Struct, frozen=True):
    """`expr` converted to another kind, one of CASTS."""

    expr: Expr
    kind: str


class Case(msgspec.Struct, frozen=True):
    """The result of the first branch (condition, result) whose condition is true, else `otherwise`."""

    branches: tuple[tuple[Expr, Expr], ...]
    otherwise: Expr


class QueryExpression(msgspec.Struct, frozen=True):
    """Base class of expressions that are allowed in queries and not in a condition on one row."""


Expr = Col | Literal | Call | Function | Cast | Case | QueryExpression

_AB = ("a", "b")
OPS: dict[str, tuple[str, ...]] = {  # op -> its operand fields
    **dict.fromkeys(("and", "or"), ("args",)),
    **dict.fromkeys(("not", "is_null"), ("a",)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "like", "ilike"), _AB),
    **dict.fromkeys(("add", "sub", "mul", "div", "mod"), _AB),
    "in": ("a", "list"),
    "between": ("a", "lo", "hi"),
}
MANY = 100
FUNCTIONS: dict[str, tuple[int, int]] = {  # name -> fewest and most arguments
    **dict.fromkeys(("lower", "upper", "length", "octet_length", "unicode"), (1, 1)),
    **dict.fromkeys(("abs", "sign", "hex", "typeof", "quote"), (1, 1)),
    **dict.fromkeys(("trim", "ltrim", "rtrim", "round", "unhex"), (1, 2)),
    **dict.fromkeys(("ifnull", "nullif", "instr"), (2, 2)),
    **dict.fromkeys(("substr", "substring"), (2, 3)),
    **dict.fromkeys(("replace", "iif"), (3, 3)),
    **dict.fromkeys(("coalesce", "min", "max"), (2, MANY)),  # min and max of one argument are aggregates
    "char": (1, MANY),
}
CASTS = {"i64": "i64", "f64": "f64", "str": "str", "varchar": "str", "bytes": "bytes"}
_ONE_ROW = "A condition reads one row. Use subqueries and aggregates in queries."


# --- making ----------------------------------------------------------------------------------------------


def eq(column: str, value: Value) -> Expr:
    """Return the condition that `column` equals `value`; NULL equals nothing."""
    return Call("eq", (Col(column), Literal(value)))


def all_of(exprs: Sequence[Expr]) -> Expr:
    """Return the condition that all `exprs` are true; true if there are none."""
    if len(exprs) == 1:
        return exprs[0]
    return Call("and", tuple(exprs)) if exprs else Literal(True)


def key_is(table: Table, key: Key) -> Expr:
    """Return the condition that a row has `key`, where NULL equals NULL; InvalidRequest if its length is wrong."""
    if len(key) != len(table.key):
        raise InvalidRequest(
            f"the key of {table.name!r} has {len(table.key)} values, {len(key)} given",
            hint=f"Its key columns are {', '.join(table.key)}." if table.key else "",
        )
    pairs = zip(table.key, key, strict=True)
    return all_of([Call("is", (Col(name), Literal(value))) for name, value in pairs])


# --- walking ---------------------------------------------------------------------------------------------


def children(expr: Expr) -> Iterator[Expr]:
    """Yield the expressions directly inside `expr`."""
    match expr:
        case Call(args=args) | Function(args=args):
            yield from args
        case Cast(expr=inner):
            yield inner
        case Case(branches=branches, otherwise=otherwise):
            for branch in branches:
                yield from branch
            yield otherwise


# --- reading ---------------------------------------------------------------------------------------------


def parse_expr(body: Any, *, args: Sequence[Value] = (), path: str = "where") -> Expr:
    """Return the expression in the JSON `body`, with `args` in place of its params.

    Raise InvalidRequest or NotSupported with the path of the error: `where.a.b[2]: unknown op 'foo'`.
    """
    return ExprReader(args).read(body, path, 1)


def bad(path: str, why: str, hint: str = "") -> InvalidRequest:
    """Return the error for a fault at `path`."""
    return InvalidRequest(f"{path}: {why}", hint=hint)


def field(body: dict[str, Any], name: str, wanted: type, path: str) -> Any:
    """Return the field `name`; InvalidRequest if it is not exactly of the `wanted` type."""
    value = body[name]
    if type(value) is not wanted:
        words = {str: "a string", list: "a list", dict: "an object", int: "an integer", bool: "true or false"}
        raise bad(f"{path}.{name}", f"{words[wanted]} was expected")
    return value


def check_fields(body: dict[str, Any], path: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise InvalidRequest for unknown fields and for missing `required` ones."""
    for name in body:
        if name not in required and name not in optional:
            raise bad(path, f"unknown field {name[:40]!r}")
    for name in required:
        if name not in body:
            raise bad(path, f"field {name!r} is missing")


class ExprReader:
    """Parses one JSON expression, with `args` in place of its params; limits nodes and depth against hostile JSON."""

    def __init__(self, args: Sequence[Value]) -> None:
        self.args = args
        self.nodes = 0
        self.forms: dict[str, Callable[[dict[str, Any], str, int], Expr]] = {
            "col": self.col,
            "lit": self.lit,
            "param": self.param,
            "op": self.op,
            "fn": self.function,
            "cast": self.cast,
            "case": self.case,
            "subquery": self.reject_subquery,
            "exists": self.reject_subquery,
        }

    def enter(self, path: str, depth: int) -> None:
        """Count one more node at `depth`; InvalidRequest if there are too many or it is too deep."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise bad(path, f"more than {MAX_NODES} parts in one expression")
        if depth > MAX_DEPTH:
            raise bad(path, f"nested deeper than {MAX_DEPTH}")

    def read(self, body: Any, path: str, depth: int) -> Expr:
        """Parse the expression at `path`."""
        self.enter(path, depth)
        forms = [form for form in self.forms if form in body] if isinstance(body, dict) else []
        if len(forms) != 1:
            raise bad(path, f"an object with one of {', '.join(self.forms)} was expected")
        return self.forms[forms[0]](body, path, depth)

    def many(self, body: dict[str, Any], name: str, path: str, depth: int) -> tuple[Expr, ...]:
        """Parse the list of expressions in the field `name`."""
        items = enumerate(field(body, name, list, path))
        return tuple([self.read(item, f"{path}.{name}[{place}]", depth + 1) for place, item in items])

    def col(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a column."""
        check_fields(body, path, ["col"], ["table"])
        table = field(body, "table", str, path) if body.get("table") is not None else None
        return Col(field(body, "col", str, path), table)

    def lit(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a literal."""
        check_fields(body, path, ["lit"])
        try:
            value = from_json(body["lit"])
        except InvalidRequest as error:
            raise bad(f"{path}.lit", error.message, error.hint) from None
        return known_literal(value, path)

    def param(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Return the argument of a param as a literal."""
        check_fields(body, path, ["param"])
        place = field(body, "param", int, path)
        if not 0 <= place < len(self.args):
            raise bad(path, f"param {place} has no argument; {len(self.args)} given", "Params count from 0.")
        return known_literal(self.args[place], path)

    def op(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse an operator with its operands."""
        name = field(body, "op", str, path)
        operands = OPS.get(name)
        if operands is None:
            raise bad(path, f"unknown op {name[:40]!r}", f"Known ops are {', '.join(OPS)}.")
        if operands == ("args",) and "args" not in body:
            operands = _AB  # two operands may be written as a and b
        check_fields(body, path, ["op", *operands])
        args: list[Expr] = []
        for operand in operands:
            if operand in ("args", "list"):
                args += self.many(body, operand, path, depth)
            else:
                args.append(self.read(body[operand], f"{path}.{operand}", depth + 1))
        if not args:
            raise bad(f"{path}.args", "at least one operand was expected")
        return Call(name, tuple(args))

    def function(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a call of one of FUNCTIONS."""
        check_fields(body, path, ["fn", "args"], ["distinct"])
        name = field(body, "fn", str, path).lower()
        if name not in FUNCTIONS:
            known = ", ".join(sorted(FUNCTIONS))
            raise NotSupported(f"{path}: function {name[:40]!r} is not supported", hint=f"Supported are {known}.")
        if "distinct" in body and field(body, "distinct", bool, path):
            raise NotSupported(f"{path}: distinct belongs to aggregates", hint=_ONE_ROW)
        args = self.many(body, "args", path, depth)
        check_count(name, FUNCTIONS[name], len(args), path)
        return Function(name, args)

    def cast(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse an exact cast."""
        check_fields(body, path, ["cast"])
        inner, path = field(body, "cast", dict, path), f"{path}.cast"
        check_fields(inner, path, ["expr", "to"])
        return Cast(self.read(inner["expr"], f"{path}.expr", depth + 1), _cast_kind(inner, path))

    def case(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Parse a case expression."""
        check_fields(body, path, ["case"])
        inner, path = field(body, "case", dict, path), f"{path}.case"
        check_fields(inner, path, ["when"], ["else"])
        branches = []
        for place, branch in enumerate(field(inner, "when", list, path)):
            at = f"{path}.when[{place}]"
            if not isinstance(branch, dict):
                raise bad(at, "an object was expected")
            check_fields(branch, at, ["if", "then"])
            condition = self.read(branch["if"], f"{at}.if", depth + 1)
            branches.append((condition, self.read(branch["then"], f"{at}.then", depth + 1)))
        if not branches:
            raise bad(f"{path}.when", "at least one branch was expected")
        otherwise = inner.get("else")
        last = Literal(None) if otherwise is None else self.read(otherwise, f"{path}.else", depth + 1)
        return Case(tuple(branches), last)

    def reject_subquery(self, body: dict[str, Any], path: str, depth: int) -> Expr:
        """Raise NotSupported: a condition on one row has no subqueries."""
        raise NotSupported(f"{path}: subqueries are not supported here", hint=_ONE_ROW)


def check_count(name: str, takes: tuple[int, int], given: int, path: str) -> None:
    """Raise InvalidRequest for a call of `name` with too few or too many arguments."""
    fewest, most = takes
    if not fewest <= given <= most:
        wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise bad(path, f"{name} takes {wanted} arguments, {given} given")


def known_literal(value: Value, path: str) -> Literal:
    """Return `value` as a literal; InvalidRequest if it is UNAVAILABLE."""
    if value is UNAVAILABLE:
        raise bad(path, "an unavailable value cannot be compared")
    return Literal(value)


def _cast_kind(body: dict[str, Any], path: str) -> str:
    to = field(body, "to", dict, path)
    check_fields(to, f"{path}.to", ["kind"], ["max", "precision", "scale", "charset", "collation", "unsigned"])
    kind = CASTS.get(field(to, "kind", str, f"{path}.to"))
    if kind is None or any(value is not None for name, value in to.items() if name != "kind"):
        raise NotSupported(
            f"{path}.to: no exact cast to this type",
            hint=f"Cast to one of {', '.join(CASTS)}, without limits.",
        )
    return kind
