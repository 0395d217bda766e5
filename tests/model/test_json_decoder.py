"""Decoded JSON equals that of msgspec, whose numbers it converts by Python."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suite.examples import examples

import headwater
from headwater.model import json_decoder

numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
# Decoders of texts that Headwater itself wrote, or that have no numbers.
OWN = {
    "serve/auth/api_keys.py",
    "serve/gateway/messages.py",
    "serve/http/handlers/pull_query_string.py",
    "serve/rpc/envelope.py",
    "queries/etag/table_versions.py",
    "queries/patch/patch.py",
    "feeds/subscriptions/store.py",
}


def outcome(decode: Any, text: str) -> Any:
    try:
        return decode(text)
    except msgspec.MsgspecError as error:
        return str(error)


@examples(300)
@given(st.lists(numbers, max_size=5))
def test_numbers_are_equal_to_those_of_msgspec(texts: list[str]) -> None:
    text = f"[{', '.join(texts)}]"
    assert repr(outcome(json_decoder.decode, text)) == repr(outcome(msgspec.json.decode, text))


@pytest.mark.parametrize(
    "text", ["1e309", "-1e309", "1e-400", "5e-324", "1.7976931348623157e308", "61739086064701751884e99"]
)
def test_extreme_number_is_equal_to_that_of_msgspec(text: str) -> None:
    assert outcome(json_decoder.decode, text) == outcome(msgspec.json.decode, text)


def test_number_out_of_range_is_refused_in_a_struct_as_well() -> None:
    with pytest.raises(msgspec.ValidationError, match="Number out of range"):
        json_decoder.decoder(dict[str, list[Any]]).decode('{"args": [1e400]}')
    assert math.isclose(json_decoder.decoder(dict[str, float]).decode('{"v": 1e300}')["v"], 1e300)


def test_texts_of_callers_are_decoded_by_no_other_decoder() -> None:
    source = Path(headwater.__file__).parent
    found = {
        str(path.relative_to(source))
        for room in ("serve", "queries", "feeds")
        for path in (source / room).rglob("*.py")
        if re.search(r"msgspec\.json\.(decode|Decoder)\(", path.read_text())
    }
    assert found <= OWN
