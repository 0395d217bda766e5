"""docs/query-form.md is true: its example is the statement it shows, and its lists are those of the code."""

import json
import re

import msgspec
from tests.doc_pages import blocks, page
from tests.model.parsed_query import parse_query

from headwater.model.predicate import FUNCTIONS, MAX_DEPTH, MAX_NODES
from headwater.model.query.json_form import AGGREGATES, MAX_PARAMETERS, QUERY_FUNCTIONS
from headwater.model.query.query import JOINS, SET_OPS
from headwater.queries.etag.causality import parse
from headwater.sources.sqlite.query.query_sql import query_sql

TEXT = page("docs/query-form.md")


def test_documented_json_query_compiles_to_the_documented_sql() -> None:
    (body,) = [body for name, body in blocks(TEXT, "json") if name == "query"]
    ((_, sql),) = blocks(TEXT, "sql")
    assert query_sql(parse_query(json.loads(body))) == " ".join(sql.split())


def test_documented_functions_aggregates_joins_and_limits_match_the_code() -> None:
    functions = TEXT.split("All functions of conditions, and:")[1].split(".")[0]
    assert re.findall(r"`(\w+)`", functions) == sorted(QUERY_FUNCTIONS.keys() - FUNCTIONS)
    aggregates = TEXT.split("Aggregates:")[1].split(".")[0]
    assert re.findall(r"`(\w+)`", aggregates) == sorted(AGGREGATES)
    assert all(f"`{word}`" in TEXT for word in (*JOINS, *SET_OPS))
    assert f"nested {MAX_DEPTH} deep and have {MAX_NODES:,} parts" in TEXT
    assert f"counted from 0 to {MAX_PARAMETERS - 1}" in TEXT


def test_documented_causality_token_parses_and_encodes_to_the_same_json() -> None:
    (body,) = [body for name, body in blocks(TEXT, "json") if name == "token"]
    assert json.loads(msgspec.json.encode(parse(body))) == json.loads(body)
