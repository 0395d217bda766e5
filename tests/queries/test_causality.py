"""Causality tokens: built, written as headers, read back, refused when malformed."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.queries.causality import from_header, parse, to_header, token


def test_a_token_names_each_table_with_its_offset() -> None:
    found = json.loads(base64.urlsafe_b64decode(to_header(token("main", {"b": 2, "a": 7})) + "=="))
    assert found == {
        "format": "vector_clock_v2",
        "deps": [{"table": "main.a", "v": 7}, {"table": "main.b", "v": 2}],
    }


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 2**62), max_size=5))
def test_a_header_reads_back(tables: dict[str, int]) -> None:
    found = token("main", tables)
    header = to_header(found)
    assert from_header(header) == found
    assert from_header(header + "=" * (-len(header) % 4)) == found
    assert header.isascii() and "=" not in header


def test_the_older_format_is_read_too() -> None:
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
        "[" * 5000,
    ],
)
def test_a_malformed_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


@pytest.mark.parametrize("text", ["!!!", "a", "ä", "e30=e30=", "////"])
def test_an_unreadable_header_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        from_header(text)
