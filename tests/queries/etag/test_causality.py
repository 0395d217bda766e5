"""Causality tokens: built, written as headers, read back, refused when malformed."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.queries.etag.token_order import dominates, merge

from headwater.errors import InvalidRequest, PreconditionFailed
from headwater.queries.etag.causality import (
    MAX_DEPS,
    Dep,
    Token,
    demand,
    floor_of,
    from_header,
    from_json,
    lacking,
    parse,
    to_header,
    token,
)


def test_causality_header_lists_each_table_with_its_offset_in_name_order() -> None:
    found = json.loads(base64.urlsafe_b64decode(to_header(token("main", {"b": 2, "a": 7})) + "=="))
    assert found == {
        "format": "vector_clock_v2",
        "deps": [{"table": "main.a", "v": 7}, {"table": "main.b", "v": 2}],
    }


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 2**62), max_size=5))
def test_causality_header_round_trips_with_and_without_base64_padding(tables: dict[str, int]) -> None:
    found = token("main", tables)
    header = to_header(found)
    assert from_header(header) == found
    assert from_header(header + "=" * (-len(header) % 4)) == found
    assert header.isascii() and "=" not in header


def test_causality_token_in_etag_chain_v1_format_is_accepted() -> None:
    assert parse('{"format":"etag_chain_v1","deps":[]}').format == "etag_chain_v1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format":"v9","deps":[]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a"}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","v":-1}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","v":"1"}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"a","v":1}]}',
        '{"format":"vector_clock_v2","deps":[],"x":1}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.","v":1}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","v":null}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","v":true}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","v":1.5}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","change_seq":1}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.a","v":1,"stale":false}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.v","view":true}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.v","view":true,"v":1}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.v","view":true,"change_seq":-1}]}',
        '{"format":"vector_clock_v2","deps":[{"table":"main.v","view":true,"change_seq":1,"stale":0}]}',
        json.dumps({"format": "vector_clock_v2", "deps": [{"table": "main.a", "v": 1}] * (MAX_DEPS + 1)}),
        "[" * 5000,
    ],
)
def test_malformed_causality_token_text_is_rejected_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidRequest, match="malformed min_causality|unsupported causality format") as caught:
        parse(text)
    assert caught.value.code == "invalid_request" and caught.value.hint


@pytest.mark.parametrize("body", [None, 5, [], {}, {"format": 5}, {"format": "vector_clock_v2", "deps": {}}])
def test_malformed_causality_token_in_request_json_is_rejected(body: object) -> None:
    with pytest.raises(InvalidRequest, match="malformed min_causality"):
        from_json(body)


@pytest.mark.parametrize("text", ["!!!", "a", "ä", "e30=e30=", "////"])
def test_causality_header_that_cannot_be_decoded_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        from_header(text)


VIEW = {"table": "main.v", "view": True, "change_seq": 17, "stale": False}


def test_causality_token_with_a_view_dependency_round_trips() -> None:
    body = {"format": "vector_clock_v2", "deps": [VIEW, {"table": "main.a", "v": 3}]}
    found = from_json(body)
    assert json.loads(base64.urlsafe_b64decode(to_header(found) + "==")) == body
    assert from_json({"format": "etag_chain_v1", "deps": [{"table": "x.v", "view": True, "change_seq": 0}]}).deps


names = st.sampled_from(["main.a", "default.a", ".a", "main.b", "other.a", "main.a.b"])
tables = st.builds(Dep, names, st.integers(0, 5))
views = st.builds(Dep, names, st.none(), st.just(True), st.integers(0, 5), st.one_of(st.none(), st.booleans()))
tokens = st.builds(Token, st.sampled_from(["vector_clock_v2", "etag_chain_v1"]), st.lists(tables | views).map(tuple))


@given(tokens, tokens, tokens)
def test_merged_tokens_have_the_highest_offset_of_each_table_in_any_order(a: Token, b: Token, c: Token) -> None:
    both = merge(a, b)
    assert both == merge(b, a) == merge(a, a, b) == merge(both)
    assert merge(a, merge(b, c)) == merge(both, c)
    assert dominates(both, a) and dominates(both, b)
    assert from_header(to_header(both)) == both
    most = {dep.key: dep.seen for dep in both.deps}
    every = [*a.deps, *b.deps]
    assert most == {key: max(dep.seen for dep in every if dep.key == key) for key in {dep.key for dep in every}}


@given(tokens, tokens)
def test_merge_of_a_token_with_one_it_dominates_is_that_token(a: Token, b: Token) -> None:
    seen = [(dep.key, dep.seen) for dep in merge(a).deps]
    assert dominates(a, b) == ([(dep.key, dep.seen) for dep in merge(a, b).deps] == seen)


def test_token_dominates_another_only_if_no_table_is_behind() -> None:
    assert dominates(token("main", {"a": 3, "b": 0}), token("default", {"a": 3}))
    assert not dominates(token("main", {"a": 3}), token("main", {"a": 3, "b": 0}))
    assert not dominates(token("main", {"a": 3}), token("main", {"a": 4}))
    assert dominates(token("main", {}), token("main", {}))


def test_causality_floor_has_only_tables_of_the_query() -> None:
    deps = [
        {"table": "main.a", "v": 3},
        {"table": "default.a", "v": 5},
        {"table": "other.a", "v": 9},
        {"table": "main.far", "v": 9},
        {"table": "main.b", "view": True, "change_seq": 9},
        {"table": "main.dotted.name", "v": 2},
    ]
    found = from_json({"format": "vector_clock_v2", "deps": deps})
    assert floor_of(found, "main", ["a", "b", "dotted.name", "more"]) == {"a": 5, "dotted.name": 2}
    assert floor_of(found, "default", {"a"}) == {"a": 5}
    assert floor_of(Token(found.format, found.deps[::-1]), "main", {"a"}) == {"a": 5}
    assert floor_of(found, "other", {"a", "far"}) == {"a": 9}
    assert floor_of(found, "main", []) == {}


def test_table_below_the_causality_token_offset_raises_precondition_failed() -> None:
    demand({}, {})
    demand({"a": 3, "b": 0}, {"a": 3})
    assert lacking({"a": 3, "b": 4}, {"a": 3, "b": 3}) == {"b": 4}
    with pytest.raises(PreconditionFailed, match="'b' is at 3 here, below the floor 4") as caught:
        demand({"a": 3, "b": 4}, {"a": 3, "b": 3})
    assert caught.value.code == "precondition_failed" and caught.value.hint
    with pytest.raises(PreconditionFailed):
        demand({"c": 1}, {"a": 9})


def test_causality_offset_of_an_earlier_generation_raises_precondition_failed() -> None:
    demand({"a": 9, "b": 0}, {"a": 9, "b": 9}, began=10)  # 9 is what this generation itself says of a quiet table
    with pytest.raises(PreconditionFailed, match="earlier generation of the log"):
        demand({"a": 8}, {"a": 9}, began=10)
