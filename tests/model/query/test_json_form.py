"""The JSON form of queries: every construct is parsed, every error has a path, and the form is canonical."""

import json
import random
from typing import Any

import pytest
from tests.model.parsed_query import parse_query
from tests.model.random_forms import Forms, shuffled

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import U64
from headwater.model.predicate import MAX_DEPTH, MAX_NODES, Call, Col, Function, Literal
from headwater.model.query.canonical_json import canonical_bytes, form_of
from headwater.model.query.json_form import parse_query_of
from headwater.model.query.query import (
    MAX_TEXT,
    Aggregate,
    Derived,
    Exists,
    InQuery,
    Item,
    Join,
    NamedTable,
    Order,
    Param,
    Query,
    Select,
    SetOp,
    Star,
    Subquery,
    With,
)

ID = {"col": "id"}
ITEM = {"expr": ID}
ONE = Select((Item(Col("id")),))


def canonical(body: Any, *, db: str = "main") -> bytes:
    return canonical_bytes(parse_query(body, db=db))


def select(**fields: Any) -> dict[str, Any]:
    """Return the JSON of a query with one select; `from_` and `with_` stand for `from` and `with`."""
    outer = {name.rstrip("_"): fields.pop(name) for name in ("with_", "order_by", "limit", "lock") if name in fields}
    inner = {"projection": [ITEM]} | {name.rstrip("_"): value for name, value in fields.items()}
    return {"body": {"select": inner}} | outer


def setop(kind: str = "union", **fields: Any) -> dict[str, Any]:
    return {"body": {"setop": {"kind": kind, "left": select()["body"], "right": select()["body"]} | fields}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (select(), Query(ONE)),
        (select(from_=None, where=None, distinct=None, group_by=None, having=None, lock=None), Query(ONE)),
        (select(lock="none", limit={}, order_by=[], with_=[]), Query(ONE)),
        (select(distinct=True), Query(Select((Item(Col("id")),), distinct=True))),
        (select(projection=[{"expr": ID, "as": "n"}]), Query(Select((Item(Col("id"), "n"),)))),
        (
            select(projection=[{"expr": {"col": "*"}}, {"expr": {"col": "*", "table": "u"}}]),
            Query(Select((Item(Star()), Item(Star("u"))))),
        ),
        (
            select(
                from_=[{"table": "users", "as": "u"}, {"db": "default", "table": "t"}, {"db": "main", "table": "x"}]
            ),
            Query(Select((Item(Col("id")),), (NamedTable("users", "u"), NamedTable("t"), NamedTable("x")))),
        ),
        (
            select(from_=[{"subquery": {"query": select(), "as": "d"}}]),
            Query(Select((Item(Col("id")),), (Derived(Query(ONE), "d"),))),
        ),
        (
            select(from_=[{"join": {"type": "left", "left": {"table": "a"}, "right": {"table": "b"}, "on": ID}}]),
            Query(Select((Item(Col("id")),), (Join("left", NamedTable("a"), NamedTable("b"), Col("id")),))),
        ),
        (
            select(
                from_=[
                    {"join": {"type": "full", "left": {"table": "a"}, "right": {"table": "b"}, "using_columns": ["k"]}}
                ]
            ),
            Query(Select((Item(Col("id")),), (Join("full", NamedTable("a"), NamedTable("b"), None, ("k",)),))),
        ),
        (
            select(group_by=[ID], having={"op": "gt", "a": {"fn": "COUNT"}, "b": {"lit": 1}}),
            Query(
                Select(
                    (Item(Col("id")),),
                    group_by=(Col("id"),),
                    having=Call("gt", (Aggregate("count", ()), Literal(1))),
                )
            ),
        ),
        (
            select(order_by=[{"expr": ID}, {"expr": ID, "dir": "desc"}, {"expr": ID, "dir": "asc"}]),
            Query(ONE, order_by=(Order(Col("id")), Order(Col("id"), True), Order(Col("id")))),
        ),
        (select(limit={"limit": 3, "offset": 0}), Query(ONE, limit=Literal(3), offset=Literal(0))),
        (select(limit={"limit": {"lit": {"t": "u64", "v": 3}}}), Query(ONE, limit=Literal(3))),
        (select(limit={"offset": {"param": 1}}), Query(ONE, offset=Param(1), parameters=("1", "2"))),
        (
            select(with_=[{"name": "w", "query": select()}]),
            Query(ONE, with_=(With("w", Query(ONE)),)),
        ),
        (setop(), Query(SetOp("union", False, ONE, ONE))),
        (setop("except", all=False), Query(SetOp("except", False, ONE, ONE))),
        (setop(all=True, left=setop()["body"]), Query(SetOp("union", True, SetOp("union", False, ONE, ONE), ONE))),
    ],
)
def test_every_construct_of_a_query_is_parsed(body: Any, expected: Query) -> None:
    assert parse_query(body) == expected
    assert parse_query(json.loads(canonical(body))) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"param": 4}, Param(4)),
        ({"fn": "count", "args": [{"col": "*"}]}, Aggregate("count", ())),
        ({"fn": "count", "args": [ID], "distinct": True}, Aggregate("count", (Col("id"),), True)),
        ({"fn": "min", "args": [ID]}, Aggregate("min", (Col("id"),))),
        ({"fn": "min", "args": [ID, ID], "distinct": False}, Function("min", (Col("id"), Col("id")))),
        ({"fn": "group_concat", "args": [ID, {"lit": "; "}]}, Aggregate("group_concat", (Col("id"), Literal("; ")))),
        ({"fn": "concat", "args": [ID, {"lit": "x"}]}, Function("concat", (Col("id"), Literal("x")))),
        ({"subquery": {"query": select()}}, Subquery(Query(ONE))),
        ({"exists": {"query": select()}}, Exists(Query(ONE))),
        ({"exists": {"query": select(), "negated": True}}, Exists(Query(ONE), True)),
        ({"op": "in", "a": ID, "b": {"subquery": {"query": select()}}}, InQuery(Col("id"), Query(ONE))),
        ({"op": "in", "a": ID, "list": [{"param": 0}]}, Call("in", (Col("id"), Param(0)))),
        ({"lit": {"t": "u64", "v": 1}}, Literal(U64(1))),
    ],
)
def test_every_expression_of_a_query_is_parsed(body: Any, expected: Any) -> None:
    found = parse_query(select(where=body))
    assert isinstance(found.body, Select) and found.body.where == expected
    assert parse_query(form_of(found)) == found


def test_parameter_in_a_nested_subquery_is_listed_among_the_query_parameters() -> None:
    inner = select(where={"op": "eq", "a": ID, "b": {"param": 2}})
    assert parse_query(select(where={"exists": {"query": inner}})).parameters == ("1", "2", "3")


JOIN = {"type": "inner", "left": {"table": "a"}, "right": {"table": "b"}, "on": ID}


def joined(**fields: Any) -> dict[str, Any]:
    return select(from_=[{"join": JOIN | fields}])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (7, "query: an object was expected"),
        ([], "query: an object was expected"),
        ({}, "query: field 'body' is missing"),
        (select() | {"x": 1}, "query: unknown field 'x'"),
        ({"body": {}}, "query.body: an object with either select or setop was expected"),
        ({"body": select()["body"] | setop()["body"]}, "query.body: an object with either select or setop"),
        ({"body": {"select": 5}}, "query.body.select: an object was expected"),
        ({"body": {"select": {}}}, "query.body.select: field 'projection' is missing"),
        (select(projection=[]), "query.body.select.projection: at least one column was expected"),
        (select(projection=ID), "query.body.select.projection: a list was expected"),
        (select(projection=[5]), "query.body.select.projection[0]: an object was expected"),
        (select(projection=[{"expr": 5}]), "query.body.select.projection[0].expr: an object with one of col"),
        (select(projection=[ITEM | {"as": ""}]), "query.body.select.projection[0].as: a name was expected"),
        (select(projection=[ITEM | {"as": "a\0"}]), "query.body.select.projection[0].as: a name was expected"),
        (select(projection=[ITEM | {"as": "\ud800"}]), "query.body.select.projection[0].as: a name was expected"),
        (select(projection=[{"expr": {"col": "*"}, "as": "x"}]), "query.body.select.projection[0]: all columns cannot"),
        (select(distinct=1), "query.body.select.distinct: true or false was expected"),
        (select(y=1), "query.body.select: unknown field 'y'"),
        (select(from_={}), "query.body.select.from: a list was expected"),
        (select(from_=[{"table": "a", "x": 1}]), "query.body.select.from[0]: unknown field 'x'"),
        (select(from_=[{"db": "main"}]), "query.body.select.from[0]: an object with one of table, join, subquery"),
        (select(from_=[{"table": 5}]), "query.body.select.from[0].table: a string was expected"),
        (select(from_=["a"]), "query.body.select.from[0]: an object with one of table"),
        (select(from_=[{"table": "a", "join": JOIN}]), "query.body.select.from[0]: an object with one of table"),
        (
            select(from_=[{"subquery": {"query": select()}}]),
            "query.body.select.from[0].subquery: field 'as' is missing",
        ),
        (
            select(from_=[{"subquery": {"query": select(x=1), "as": "d"}}]),
            "query.body.select.from[0].subquery.query.body.select: unknown field 'x'",
        ),
        (joined(type="outer"), "query.body.select.from[0].join.type: one of inner, left, right, full, cross"),
        (joined(on=None), "query.body.select.from[0].join: a cross join has no condition"),
        (joined(type="cross"), "query.body.select.from[0].join: a cross join has no condition"),
        (joined(using_columns=["a"]), "query.body.select.from[0].join: a cross join has no condition"),
        (joined(on=None, using_columns=[5]), "query.body.select.from[0].join.using_columns[0]: a string was expected"),
        (joined(left={"table": ""}), "query.body.select.from[0].join.left.table: a name was expected"),
        (joined(y=5), "query.body.select.from[0].join: unknown field 'y'"),
        (select(where={"op": "x"}), "query.body.select.where: unknown op 'x'"),
        (select(where={"col": "*"}), "query.body.select.where: `*` is allowed only in a projection"),
        (select(where={"fn": "sum", "args": [{"col": "*"}]}), "query.body.select.where.args[0]: `*` is allowed only"),
        (select(where={"fn": "sum", "args": []}), "query.body.select.where: sum takes 1 arguments, 0 given"),
        (select(where={"fn": "count", "distinct": True}), "query.body.select.where.distinct: exactly one argument"),
        (
            select(where={"fn": "group_concat", "args": [ID, ID], "distinct": True}),
            "query.body.select.where.distinct: exactly one argument",
        ),
        (
            select(where={"fn": "lower", "args": [ID], "distinct": True}),
            "query.body.select.where.distinct: only an aggregate can be distinct",
        ),
        (select(where={"fn": "lower", "args": 5}), "query.body.select.where.args: a list was expected"),
        (select(where={"param": -1}), "query.body.select.where: params are counted from 0"),
        (select(where={"param": 999}), "query.body.select.where: params are counted from 0 to 998"),
        (select(where={"param": True}), "query.body.select.where.param: an integer was expected"),
        (select(where={"op": "in", "a": ID, "b": ID}), "query.body.select.where.b: a subquery was expected"),
        (select(where={"op": "in", "a": ID}), "query.body.select.where: field 'list' is missing"),
        (
            select(where={"op": "in", "a": ID, "list": [{"subquery": {"query": select()}}]}),
            "query.body.select.where.list: a subquery here would be one value",
        ),
        (
            select(where={"exists": {"query": select(), "negated": 1}}),
            "query.body.select.where.exists.negated: true or",
        ),
        (select(where={"lit": {"t": "unavailable"}}), "query.body.select.where: an unavailable value"),
        (select(order_by=[{"expr": {"lit": 1}}]), "query.order_by[0].expr: a constant neither sorts nor groups"),
        (select(order_by=[{"expr": {"param": 0}}]), "query.order_by[0].expr: a constant neither sorts nor groups"),
        (
            select(group_by=[{"op": "and", "args": [{"op": "or", "args": [{"lit": 1}]}]}]),
            "query.body.select.group_by[0]: a constant neither sorts nor groups",
        ),
        (select(order_by=[{"expr": ID, "dir": "up"}]), "query.order_by[0].dir: one of asc, desc was expected"),
        (select(order_by=[{"expr": ID, "nulls": "last"}]), "query.order_by[0]: unknown field 'nulls'"),
        (select(limit=5), "query.limit: an object was expected"),
        (select(limit={"limit": -1}), "query.limit.limit: a count of rows was expected"),
        (select(limit={"limit": True}), "query.limit.limit: a count of rows was expected"),
        (select(limit={"limit": 1.5}), "query.limit.limit: a count of rows was expected"),
        (select(limit={"limit": "1"}), "query.limit.limit: a count of rows was expected"),
        (select(limit={"limit": ID}), "query.limit.limit: a count of rows was expected"),
        (select(limit={"limit": 2**63}), "query.limit.limit.lit: bad i64 literal"),
        (select(limit={"offset": {"lit": {"t": "u64", "v": 2**63}}}), "query.limit.offset: a count of rows"),
        (select(lock="write"), "query.lock: one of none, for_update, for_share was expected"),
        (select(with_=[{"name": "w"}]), "query.with[0]: field 'query' is missing"),
        (
            select(with_=[{"name": "w", "query": select(), "recursive": True}]),
            "query.with[0]: unknown field 'recursive'",
        ),
        (setop("minus"), "query.body.setop.kind: one of union, intersect, except was expected"),
        (setop(left=select()), "query.body.setop.left: unknown field 'body'"),
        (setop(all="yes"), "query.body.setop.all: true or false was expected"),
    ],
)
def test_invalid_query_json_is_rejected_with_the_path_of_the_bad_field(body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_query(body)
    assert caught.value.message.startswith(message)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (select(lock="for_update"), "query.lock: a query cannot lock rows"),
        (select(lock="for_share"), "query.lock: a query cannot lock rows"),
        (
            select(from_=[{"db": "other", "table": "t"}, {"db": "shop", "table": "t"}]),
            "query.body.select.from[1].db: a query can read only one database",
        ),
        (select(where={"fn": "random"}), "query.body.select.where: function 'random' is not supported"),
        (select(where={"fn": "vector.l2", "args": [ID, ID]}), "query.body.select.where: function 'vector.l2' is not"),
        (select(where={"fn": "x) --", "args": []}), "query.body.select.where: function 'x) --' is not supported"),
        (
            select(where={"cast": {"expr": ID, "to": {"kind": "uuid"}}}),
            "query.body.select.where.cast.to: no exact cast",
        ),
    ],
)
def test_unsupported_form_is_rejected_with_a_hint(body: Any, message: str) -> None:
    with pytest.raises(NotSupported) as caught:
        parse_query(body)
    assert caught.value.message.startswith(message) and caught.value.hint


def test_database_of_a_query_is_that_of_its_tables_and_main_by_default() -> None:
    own, shop = {"table": "u"}, {"db": "shop", "table": "t"}
    assert parse_query_of(select(from_=[shop]))[1] == "shop"
    assert parse_query_of(select(from_=[own, shop]))[1] == "shop"
    assert parse_query_of(select(from_=[{"db": "default", "table": "t"}]))[1] == "main"
    assert parse_query_of(select(from_=[own]))[1] == "main"
    with pytest.raises(NotSupported, match="read only one database"):
        parse_query_of(select(from_=[shop, {"db": "other", "table": "t"}]))


def test_tables_that_name_another_database_than_the_request_are_refused() -> None:
    body = select(from_=[{"db": "shop", "table": "t"}])
    assert parse_query(body, db="shop") == parse_query(select(from_=[{"table": "t"}]))
    with pytest.raises(NotSupported):
        parse_query(body, db="main")
    assert canonical(body, db="shop") == canonical(select(from_=[{"table": "t"}]))


def nested(levels: int) -> dict[str, Any]:
    found = select()
    for _ in range(levels):
        found = select(from_=[{"subquery": {"query": found, "as": "d"}}])
    return found


@pytest.mark.slow
def test_queries_nested_too_deep_or_with_too_many_parts_are_refused() -> None:
    sets: Any = select()["body"]
    joins: Any = {"table": "a"}
    for _ in range(MAX_DEPTH + 1):
        sets = {"setop": {"kind": "union", "left": sets, "right": select()["body"]}}
        joins = {"join": {"type": "cross", "left": joins, "right": {"table": "b"}}}
    withs = select()
    for _ in range(MAX_DEPTH + 1):
        withs = select(with_=[{"name": "w", "query": withs}])
    for body in (nested(5_000), {"body": sets}, select(from_=[joins]), withs):
        with pytest.raises(InvalidRequest, match="nested deeper than 64"):
            parse_query(body)
    for body in (select(projection=[ITEM] * (MAX_NODES + 1)), select(from_=[{"table": "a"}] * (MAX_NODES + 1))):
        with pytest.raises(InvalidRequest, match="more than 10000 parts"):
            parse_query(body)


def test_field_order_and_defaults_do_not_change_the_canonical_form() -> None:
    one = select(where={"op": "or", "a": {"op": "eq", "a": ID, "b": {"lit": 1}}, "b": {"fn": "LOWER", "args": [ID]}})
    where = {
        "args": [
            {"b": {"lit": {"v": 1, "t": "i64"}}, "a": {"table": None, "col": "id"}, "op": "eq"},
            {"distinct": False, "args": [ID], "fn": "lower"},
        ],
        "op": "or",
    }
    # `lower` takes `distinct: false` in a query as an absent one
    assert canonical(one) == canonical(select(where=where, lock="none", distinct=False))
    assert canonical(one).startswith(b'{"body":{"select":{"projection":[{"expr":{"col":"id"}}],"where":{"args":')


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lit": {"t": "i64", "v": 1}}, {"lit": {"t": "u64", "v": 1}}),
        ({"lit": 1}, {"lit": 1.0}),
        ({"lit": 1}, {"lit": True}),
        ({"lit": 0.0}, {"lit": -0.0}),
        ({"lit": 2**53}, {"lit": 2**53 + 1}),
        ({"lit": {"t": "json", "v": {"a": 1, "b": 2}}}, {"lit": {"t": "json", "v": {"b": 2, "a": 1}}}),
        ({"lit": "a"}, {"lit": {"t": "bytes", "b64": "YQ=="}}),
        ({"col": "a"}, {"col": "A"}),
        ({"col": "a", "table": "b"}, {"col": "a"}),
    ],
)
def test_different_queries_have_different_canonical_forms(one: Any, other: Any) -> None:
    assert canonical(select(where=one)) != canonical(select(where=other))


@pytest.mark.parametrize("seed", range(40))
def test_random_queries_have_one_canonical_form_that_parses_back(seed: int) -> None:
    print("seed", seed)
    forms = Forms(random.Random(seed))
    for _ in range(10):
        body = forms.query(3)
        query = parse_query(body)
        spelled = canonical_bytes(query)
        assert canonical(shuffled(body, forms.rng)) == spelled
        assert repr(parse_query(json.loads(spelled))) == repr(query)  # repr: NaN is NaN, and 1 is not True
        assert canonical(json.loads(spelled)) == spelled


@pytest.mark.parametrize("seed", range(40))
def test_corrupted_query_json_raises_only_invalid_request(seed: int) -> None:
    print("seed", seed)
    forms = Forms(random.Random(seed))
    refused = 0
    for _ in range(50):
        body = forms.broken(forms.query(3))
        try:
            canonical(body)
        except InvalidRequest as error:
            refused += 1
            assert error.message.startswith("query")
    assert refused


HALF = "x" * (MAX_TEXT // 2)
LONG_PARTS: list[dict[str, Any]] = [
    {"lit": HALF},
    {"lit": {"t": "str", "v": HALF}},
    {"lit": {"t": "bytes", "b64": "AAAA" * (MAX_TEXT // 6)}},
    {"lit": {"t": "json", "v": [HALF]}},
    {"col": HALF},
    {"col": "id", "table": HALF},
    {"subquery": {"query": select(with_=[{"name": HALF, "query": select()}])}},
    {"exists": {"query": select(from_=[{"table": "t", "as": HALF}])}},
]


@pytest.mark.parametrize("part", LONG_PARTS)
def test_form_with_more_characters_than_a_query_is_refused_before_it_is_rendered(part: dict[str, Any]) -> None:
    parse_query(select(where=part))
    with pytest.raises(InvalidRequest, match=f"the query exceeds {MAX_TEXT} characters"):
        parse_query(select(where={"op": "and", "args": [part, {"op": "not", "a": part}, {"lit": "abcdef"}]}))
