"""JSON expressions: every form is parsed, every error has a path, and hostile input is limited."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import U64
from headwater.model.predicate import (
    FUNCTIONS,
    MAX_DEPTH,
    MAX_NODES,
    OPS,
    Call,
    Case,
    Cast,
    Col,
    Expr,
    Function,
    Literal,
    all_of,
    children,
    eq,
    key_is,
    parse_expr,
)
from headwater.model.table import Column, Table

A, ONE = {"col": "a"}, {"lit": {"t": "i64", "v": 1}}
TWO_KEYS = Table("t", (Column("a"), Column("b"), Column("c")), ("b", "a"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"col": "a"}, Col("a")),
        ({"col": "a", "table": "u"}, Col("a", "u")),
        ({"col": "a", "table": None}, Col("a")),
        ({"lit": {"t": "u64", "v": 7}}, Literal(U64(7))),
        ({"lit": "plain"}, Literal("plain")),
        ({"lit": {"t": "null"}}, Literal(None)),
        ({"param": 1}, Literal("second")),
        ({"op": "not", "a": A}, Call("not", (Col("a"),))),
        ({"op": "is_null", "a": A}, Call("is_null", (Col("a"),))),
        ({"op": "and", "args": [A, A, ONE]}, Call("and", (Col("a"), Col("a"), Literal(1)))),
        ({"op": "or", "a": A, "b": ONE}, Call("or", (Col("a"), Literal(1)))),
        (
            {"op": "in", "a": A, "list": [ONE, {"param": 0}]},
            Call("in", (Col("a"), Literal(1), Literal("first"))),
        ),
        ({"op": "in", "a": A, "list": []}, Call("in", (Col("a"),))),
        (
            {"op": "between", "lo": ONE, "hi": {"lit": 2}, "a": A},
            Call("between", (Col("a"), Literal(1), Literal(2))),
        ),
        ({"fn": "LOWER", "args": [A], "distinct": False}, Function("lower", (Col("a"),))),
        ({"cast": {"expr": A, "to": {"kind": "varchar", "max": None}}}, Cast(Col("a"), "str")),
        (
            {"case": {"when": [{"if": A, "then": ONE}], "else": {"lit": 2}}},
            Case(((Col("a"), Literal(1)),), Literal(2)),
        ),
        ({"case": {"when": [{"if": A, "then": ONE}]}}, Case(((Col("a"), Literal(1)),), Literal(None))),
    ],
)
def test_every_form_of_expression_is_parsed(body: Any, expected: Expr) -> None:
    assert parse_expr(body, args=("first", "second")) == expected


@pytest.mark.parametrize("op", [op for op, operands in OPS.items() if operands == ("a", "b")])
def test_every_binary_op_keeps_its_operands_in_order(op: str) -> None:
    assert parse_expr({"op": op, "b": ONE, "a": A}) == Call(op, (Col("a"), Literal(1)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            7,
            "where: an object with one of col, lit, param, op, fn, cast, case, subquery, exists was expected",
        ),
        ({}, "where: an object with one of"),
        ({"col": "a", "op": "eq"}, "where: an object with one of"),
        ({"op": "foo"}, "where: unknown op 'foo'"),
        ({"op": "is", "a": A, "b": A}, "where: unknown op 'is'"),
        ({"op": 5}, "where.op: a string was expected"),
        ({"op": "eq", "a": A}, "where: field 'b' is missing"),
        ({"op": "eq", "a": A, "b": A, "c": A}, "where: unknown field 'c'"),
        ({"op": "not", "a": A, "b": A}, "where: unknown field 'b'"),
        ({"op": "and"}, "where: field 'a' is missing"),
        ({"op": "and", "args": []}, "where.args: at least one operand was expected"),
        ({"op": "and", "args": A}, "where.args: a list was expected"),
        (
            {"op": "and", "args": [A, {"op": "eq", "a": A, "b": {"op": "foo"}}]},
            "where.args[1].b: unknown op 'foo'",
        ),
        ({"op": "in", "a": A, "list": [ONE, ONE, {"lit": {}}]}, "where.list[2].lit: bad value literal"),
        ({"op": "between", "a": A, "lo": ONE}, "where: field 'hi' is missing"),
        ({"col": None}, "where.col: a string was expected"),
        ({"col": "a", "table": 1}, "where.table: a string was expected"),
        ({"col": "a", "x": 1}, "where: unknown field 'x'"),
        ({"lit": {"t": "i64", "v": 2**70}}, "where.lit: bad i64 literal"),
        ({"lit": {"t": "unavailable"}}, "where: an unavailable value cannot be compared"),
        ({"param": 2}, "where: param 2 has no argument; 2 given"),
        ({"param": -1}, "where: param -1 has no argument"),
        ({"param": True}, "where.param: an integer was expected"),
        ({"fn": "lower", "args": []}, "where: lower takes 1 arguments, 0 given"),
        ({"fn": "min", "args": [A]}, "where: min takes 2 to 100 arguments, 1 given"),
        ({"fn": "lower", "args": [{"op": "x"}]}, "where.args[0]: unknown op 'x'"),
        ({"fn": "lower", "args": [A], "distinct": 1}, "where.distinct: true or false was expected"),
        ({"fn": "lower"}, "where: field 'args' is missing"),
        ({"cast": A}, "where.cast: unknown field 'col'"),
        ({"cast": {"expr": A, "to": {"kind": "i64", "x": 1}}}, "where.cast.to: unknown field 'x'"),
        ({"cast": {"expr": A, "to": "i64"}}, "where.cast.to: an object was expected"),
        ({"case": {"when": []}}, "where.case.when: at least one branch was expected"),
        ({"case": {"when": [5]}}, "where.case.when[0]: an object was expected"),
        ({"case": {"when": [{"if": A}]}}, "where.case.when[0]: field 'then' is missing"),
        ({"case": {"when": [{"if": A, "then": 5}]}}, "where.case.when[0].then: an object with one of"),
    ],
)
def test_invalid_predicate_is_rejected_with_the_path_of_the_bad_field(body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_expr(body, args=("first", "second"))
    assert caught.value.message.startswith(message)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"subquery": {"query": {}}}, "where: subqueries are not supported here"),
        ({"op": "not", "a": {"exists": {"query": {}}}}, "where.a: subqueries are not supported here"),
        ({"fn": "random", "args": []}, "where: function 'random' is not supported"),
        ({"fn": "vector.cosine", "args": [A, A]}, "where: function 'vector.cosine' is not supported"),
        ({"fn": "lower", "args": [A], "distinct": True}, "where: distinct belongs to aggregates"),
        ({"cast": {"expr": A, "to": {"kind": "uuid"}}}, "where.cast.to: no exact cast"),
        ({"cast": {"expr": A, "to": {"kind": "varchar", "max": 3}}}, "where.cast.to: no exact cast"),
    ],
)
def test_unsupported_form_is_rejected_with_a_hint(body: Any, message: str) -> None:
    with pytest.raises(NotSupported) as caught:
        parse_expr(body)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_predicate_error_path_starts_with_the_root_the_caller_passed() -> None:
    with pytest.raises(InvalidRequest, match=r"^filter\.a: unknown op 'x'"):
        parse_expr({"op": "not", "a": {"op": "x"}}, path="filter")


def nested(depth: int) -> Any:
    body: Any = A
    for _ in range(depth - 1):
        body = {"op": "not", "a": body}
    return body


def test_predicate_nested_deeper_than_the_limit_is_refused() -> None:
    parse_expr(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequest, match=f"nested deeper than {MAX_DEPTH}"):
        parse_expr(nested(5000))


def test_predicate_with_too_many_parts_is_refused() -> None:
    parse_expr({"op": "and", "args": [A] * (MAX_NODES - 1)})
    with pytest.raises(InvalidRequest, match=f"more than {MAX_NODES} parts"):
        parse_expr({"op": "and", "args": [A] * MAX_NODES})


FIELDS = ["col", "lit", "param", "op", "fn", "cast", "case", "subquery", "exists", "a", "b", "args", "list"]
FIELDS += ["lo", "hi", "when", "if", "then", "else", "expr", "to", "kind", "t", "v", "distinct", "table"]
WORDS = st.sampled_from([*FIELDS, "and", "or", "eq", "in", "between", "i64", "str", "lower"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_random_json_is_an_expression_or_an_invalid_request(body: Any) -> None:
    try:
        columns(parse_expr(body, args=(1, "x")))
    except InvalidRequest as error:
        assert error.message.startswith("where")


def exprs() -> st.SearchStrategy[Any]:
    """Return a strategy for well-formed JSON expressions."""
    leaf = st.sampled_from([{"col": "a"}, {"col": "b"}, ONE, {"lit": None}, {"param": 0}])

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(lambda op, args: {"op": op, "args": args}, st.sampled_from(["and", "or"]), several),
            st.builds(lambda a, b: {"op": "lt", "a": a, "b": b}, inner, inner),
            st.builds(lambda a, lo, hi: {"op": "between", "a": a, "lo": lo, "hi": hi}, inner, inner, inner),
            st.builds(lambda a, items: {"op": "in", "a": a, "list": items}, inner, several),
            st.builds(lambda a: {"cast": {"expr": a, "to": {"kind": "str"}}}, inner),
            st.builds(lambda c, t, e: {"case": {"when": [{"if": c, "then": t}], "else": e}}, inner, inner, inner),
        )

    return st.recursive(leaf, grow, max_leaves=12)


def columns(expr: Expr) -> set[str]:
    found = {expr.name} if isinstance(expr, Col) else set()
    return found.union(*map(columns, children(expr)))


def names_in(body: Any) -> set[str]:
    if isinstance(body, list):
        return set().union(*map(names_in, body))
    if isinstance(body, dict):
        return {body["col"]} if "col" in body else set().union(*map(names_in, body.values()))
    return set()


@given(exprs())
def test_columns_of_a_predicate_are_found_at_any_depth(body: Any) -> None:
    assert columns(parse_expr(body, args=(1,))) == names_in(body)


def test_column_and_literal_have_no_children() -> None:
    assert [*children(Col("a")), *children(Literal(1))] == []


def test_key_condition_compares_with_is_so_that_null_matches_null() -> None:
    assert key_is(TWO_KEYS, (None, 2)) == Call(
        "and", (Call("is", (Col("b"), Literal(None))), Call("is", (Col("a"), Literal(2))))
    )


def test_key_condition_with_too_few_values_is_rejected_and_names_the_key_columns() -> None:
    with pytest.raises(InvalidRequest, match="the key of 't' has 2 values, 1 given") as caught:
        key_is(TWO_KEYS, (1,))
    assert caught.value.hint == "Its key columns are b, a."


def test_all_of_one_condition_is_that_condition_and_of_none_is_true() -> None:
    assert all_of([eq("a", 1)]) == Call("eq", (Col("a"), Literal(1)))
    assert all_of([]) == Literal(True)


def test_allowed_functions_include_no_volatile_function() -> None:
    volatile = {
        "random",
        "randomblob",
        "date",
        "time",
        "datetime",
        "julianday",
        "strftime",
        "unixepoch",
        "changes",
    }
    assert not volatile & set(FUNCTIONS)
