"""Canonical JSON of a query: equal bytes for JSON forms that differ only in spelling.

As in RFC 8785, keys are sorted, without white space, in UTF-8. Unlike there, integers keep all digits, and the keys
of a value of tag `json` keep their order, because its text is data.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model.literal import Json, to_lit
from headwater.model.predicate import OPS, Call, Case, Cast, Col, Expr, Function, Literal, QueryExpression
from headwater.model.query import query as tree


def canonical_bytes(query: tree.Query) -> bytes:
    """Return the canonical bytes of a parsed query."""
    return msgspec.json.encode(form_of(query), order="sorted")


def form_of(query: tree.Query) -> dict[str, Any]:
    """Return the JSON form of `query`, which parses to the same query; defaults are omitted."""
    limit = _some(limit=_maybe(query.limit), offset=_maybe(query.offset))
    return _some(
        body=_body(query.body),
        order_by=[_some(expr=_expr(one.expr), dir="desc" if one.descending else None) for one in query.order_by],
        limit=limit,
    ) | _some(**{"with": [{"name": each.name, "query": form_of(each.query)} for each in query.with_]})


def _some(**fields: Any) -> dict[str, Any]:
    """Return `fields` without those that are None, False or empty."""
    return {name: value for name, value in fields.items() if value is not None and value is not False and value != []}


def _maybe(expr: Expr | None) -> Any:
    return None if expr is None else _expr(expr)


def _body(body: tree.Body) -> dict[str, Any]:
    if isinstance(body, tree.Select):
        return {"select": _select(body)}
    return {"setop": _some(kind=body.kind, all=body.all, left=_body(body.left), right=_body(body.right))}


def _select(body: tree.Select) -> dict[str, Any]:
    return _some(
        distinct=body.distinct,
        projection=[{"expr": _expr(item.expr)} | _some(**{"as": item.alias}) for item in body.items],
        where=_maybe(body.where),
        group_by=[_expr(expr) for expr in body.group_by],
        having=_maybe(body.having),
    ) | _some(**{"from": [_table(table) for table in body.tables]})


def _table(table: tree.TableRef) -> dict[str, Any]:
    match table:
        case tree.NamedTable(name, alias):
            return {"table": name} | _some(**{"as": alias})
        case tree.Derived(query, alias):
            return {"subquery": {"query": form_of(query), "as": alias}}
        case tree.Join(kind, left, right, on, using):
            sides = {"left": _table(left), "right": _table(right)}
            return {"join": {"type": kind, **sides, **_some(on=_maybe(on), using_columns=list(using))}}


def _expr(expr: Expr) -> dict[str, Any]:
    match expr:
        case Col(name, table):
            return {"col": name} | _some(table=table)
        case Literal(Json(text)):
            return {"lit": {"t": "json", "v": msgspec.Raw(text.encode())}}
        case Literal(value):
            return {"lit": to_lit(value)}
        case Call(op, args):
            return _call(op, [_expr(arg) for arg in args])
        case Function(name, args):
            return {"fn": name, "args": [_expr(arg) for arg in args]}
        case Cast(inner, kind):
            return {"cast": {"expr": _expr(inner), "to": {"kind": kind}}}
        case Case(branches, otherwise):
            whens = [{"if": _expr(condition), "then": _expr(result)} for condition, result in branches]
            return {"case": {"when": whens, "else": _expr(otherwise)}}
        case QueryExpression():
            return _queried(expr)


def _call(op: str, args: list[Any]) -> dict[str, Any]:
    match OPS[op]:
        case ("args",):
            return {"op": op, "args": args}
        case ("a", "list"):
            return {"op": op, "a": args[0], "list": args[1:]}
        case names:
            return {"op": op} | dict(zip(names, args, strict=True))


def _queried(expr: QueryExpression) -> dict[str, Any]:
    match expr:
        case tree.Param(place):
            return {"param": place}
        case tree.Star(table):
            return {"col": "*"} | _some(table=table)
        case tree.Aggregate(name, args, distinct):
            return {"fn": name, "args": [_expr(arg) for arg in args]} | _some(distinct=distinct)
        case tree.Subquery(query):
            return {"subquery": {"query": form_of(query)}}
        case tree.Exists(query, negated):
            return {"exists": {"query": form_of(query)} | _some(negated=negated)}
        case tree.InQuery(inner, query):
            return {"op": "in", "a": _expr(inner), "b": {"subquery": {"query": form_of(query)}}}
    raise TypeError(f"{type(expr).__name__} has no form")
