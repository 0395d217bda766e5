"""Values on the wire: all tags there and back, plain JSON as promised, every malformed literal refused."""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.model.model_values import ANY_JSON, BROKEN, VALUES, same
from tests.suite.examples import examples

from headwater.errors import InvalidRequest
from headwater.model.literal import (
    MAX_JSON_DEPTH,
    MOST_PARSED,
    TAGS,
    U64,
    UNAVAILABLE,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Unavailable,
    decimal_text,
    from_json,
    from_lit,
    is_broken_text,
    is_json,
    to_lit,
    to_plain,
)

EXAMPLES: list[tuple[Any, dict[str, Any], Any]] = [  # value, Lit, plain JSON
    (None, {"t": "null"}, None),
    (True, {"t": "bool", "v": True}, True),
    (-1, {"t": "i64", "v": -1}, -1),
    (U64(42), {"t": "u64", "v": 42}, 42),
    (3.5, {"t": "f64", "v": 3.5}, 3.5),
    (Decimal("12.3400"), {"t": "dec", "v": "12.3400"}, "12.3400"),
    ("x", {"t": "str", "v": "x"}, "x"),
    (b"\0\x01\x02\x03", {"t": "bytes", "b64": "AAECAw=="}, "AAECAw=="),
    (Json('{"a":[1]}'), {"t": "json", "v": {"a": [1]}}, {"a": [1]}),
    (Embedding((0.5, 1.0), "m"), {"t": "embedding", "dims": 2, "v": [0.5, 1.0], "model": "m"}, [0.5, 1.0]),
    (Embedding((0.5,)), {"t": "embedding", "dims": 1, "v": [0.5]}, [0.5]),
    (Date("2026-01-18"), {"t": "date", "iso": "2026-01-18"}, "2026-01-18"),
    (Time("12:34:56.789Z"), {"t": "time", "iso": "12:34:56.789Z"}, "12:34:56.789Z"),
    (
        DateTime("2026-01-18T12:34:56Z"),
        {"t": "datetime", "iso": "2026-01-18T12:34:56Z"},
        "2026-01-18T12:34:56Z",
    ),
    (
        UUID(int=1),
        {"t": "uuid", "v": "00000000-0000-0000-0000-000000000001"},
        "00000000-0000-0000-0000-000000000001",
    ),
]


@pytest.mark.parametrize(("value", "lit", "plain"), EXAMPLES)
def test_every_tag_round_trips_and_has_its_plain_form(value: Any, lit: dict[str, Any], plain: Any) -> None:
    assert same(from_lit(lit), value)
    assert to_lit(value) == lit
    assert to_plain(value) == plain


def test_literal_examples_cover_every_tag_and_unavailable_round_trips() -> None:
    assert {lit["t"] for _, lit, _ in EXAMPLES} == set(TAGS) - {"unavailable"}
    assert len(TAGS) == 15
    assert from_lit({"t": "unavailable"}) is UNAVAILABLE
    assert to_lit(UNAVAILABLE) == {"t": "unavailable"}


@given(VALUES)
@examples(300)
def test_value_round_trips_through_its_json_literal(value: Any) -> None:
    back = from_lit(msgspec.json.decode(msgspec.json.encode(to_lit(value))))
    if isinstance(value, str) and is_broken_text(value):
        assert back == value.encode("utf-8", "surrogateescape")  # bytes are the only honest literal for it
    elif isinstance(value, Json):
        assert isinstance(back, Json)
        assert back.value() == value.value()
    elif isinstance(value, Decimal) and value.is_finite():
        assert isinstance(back, Decimal)
        assert (back, decimal_text(back)) == (value, decimal_text(value))
    else:
        assert same(back, value)


@given(VALUES)
@examples(300)
def test_every_known_value_has_a_plain_form_that_json_can_write(value: Any) -> None:
    if value is not UNAVAILABLE:
        msgspec.json.encode(to_plain(value))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (2**53, 2**53),
        (2**53 + 1, "9007199254740993"),
        (-(2**53), -(2**53)),
        (-(2**53) - 1, "-9007199254740993"),
        (U64(2**64 - 1), "18446744073709551615"),
        (math.nan, None),
        (math.inf, None),
        (Decimal("1E+3"), "1000"),
        (Decimal("NaN"), "NaN"),
        ("a\udcff", "Yf8="),
    ],
)
def test_plain_json_writes_numbers_beyond_javascript_as_text_or_null(value: Any, plain: Any) -> None:
    assert to_plain(value) == plain


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_non_finite_floats_are_words_in_a_literal(value: float, text: str) -> None:
    assert to_lit(value) == {"t": "f64", "v": text}
    assert same(from_lit({"t": "f64", "v": text}), value)


def test_minus_zero_keeps_its_sign_in_both_forms() -> None:
    assert math.copysign(1, to_plain(-0.0)) == -1
    assert same(from_lit({"t": "f64", "v": -0.0}), -0.0)


def test_signed_and_unsigned_one_are_not_the_same_literal() -> None:
    assert from_lit({"t": "u64", "v": 1}) != from_lit({"t": "i64", "v": 1})


def test_null_literal_with_an_explicit_null_value_is_accepted() -> None:
    assert from_lit({"t": "null", "v": None}) is None


def test_unavailable_is_a_singleton() -> None:
    assert Unavailable() is UNAVAILABLE
    assert repr(UNAVAILABLE) == "UNAVAILABLE"


@given(BROKEN)
def test_text_is_broken_exactly_if_its_bytes_are_not_utf8(text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    try:
        data.decode("utf-8")
        broken = False
    except UnicodeDecodeError:
        broken = True
    assert is_broken_text(text) == broken


def test_long_text_is_examined_without_a_step_per_character() -> None:
    class Text(str):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("read character by character")

    assert not is_broken_text(Text("é" * 1_000))
    assert not is_broken_text(Text("é\ud800\udc7f\udd00"))
    assert is_broken_text(Text("é\ud800" * 1_000 + "\udcff"))


@pytest.mark.parametrize(
    "body",
    [
        None,
        5,
        "x",
        [],
        {},
        {"t": 5},
        {"t": "nope"},
        {"t": ["i64"]},
        {"t": "null", "v": 0},
        {"t": "i64"},
        {"t": "i64", "v": "1"},
        {"t": "i64", "v": True},
        {"t": "i64", "v": 1.0},
        {"t": "i64", "v": 2**63},
        {"t": "i64", "v": -(2**63) - 1},
        {"t": "i64", "v": 10**5000},
        {"t": "i64", "v": 1, "x": 1},
        {"t": "u64", "v": -1},
        {"t": "u64", "v": 2**64},
        {"t": "bool", "v": 1},
        {"t": "f64", "v": "nan"},
        {"t": "f64", "v": 10**400},
        {"t": "f64", "v": False},
        {"t": "dec", "v": 1},
        {"t": "dec", "v": "1."},
        {"t": "dec", "v": "abc"},
        {"t": "dec", "v": "1e999999999"},
        {"t": "dec", "v": "0e99999999999999999999"},
        {"t": "dec", "v": "1" * 30_000},
        {"t": "dec", "v": "0." + "1" * 40_000},
        {"t": "dec", "v": "1e1001"},
        {"t": "dec", "v": "-1e-20000"},
        {"t": "dec", "v": "sNaN"},
        {"t": "dec", "v": "١"},
        {"t": "str", "v": None},
        {"t": "str", "v": "\ud800"},
        {"t": "str", "v": "\udc80"},
        {"t": "bytes", "v": "AA=="},
        {"t": "bytes", "b64": "A"},
        {"t": "bytes", "b64": "é"},
        {"t": "bytes", "b64": "AA==\n"},
        {"t": "json"},
        {"t": "json", "v": "\ud800"},
        {"t": "json", "v": {"\udc80": 1}},
        {"t": "embedding"},
        {"t": "embedding", "v": ["1"]},
        {"t": "embedding", "v": [True]},
        {"t": "embedding", "v": [1.0], "dims": 2},
        {"t": "embedding", "v": [1.0], "dims": True},
        {"t": "embedding", "v": [10**400]},
        {"t": "embedding", "v": [1.0], "model": 5},
        {"t": "embedding", "v": [1.0], "model": "\ud800"},
        {"t": "date", "v": "2026-01-18"},
        {"t": "date", "iso": "2026-1-18"},
        {"t": "date", "iso": "2026-01-18\n"},
        {"t": "date", "iso": "٢٠٢٦-٠١-١٨"},
        {"t": "time", "iso": "12"},
        {"t": "datetime", "iso": "2026-01-18"},
        {"t": "uuid", "v": "x"},
        {"t": "uuid", "v": 5},
        {"t": "uuid", "v": "550e8400_e29b_41d4_a716_44665544"},
        {"t": "unavailable", "v": 1},
    ],
)
def test_malformed_literal_raises_invalid_request_with_a_hint_and_a_short_message(body: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_lit(body)
    assert caught.value.hint
    assert len(caught.value.message) < 500


TAGGED = st.builds(
    lambda tag, body: {"t": tag, **body},
    st.sampled_from(TAGS) | ANY_JSON,
    st.dictionaries(st.sampled_from(["v", "b64", "iso", "dims", "model", "x"]), ANY_JSON, max_size=2),
)


@pytest.mark.slow
@given(TAGGED | ANY_JSON)
@examples(500)
@example({"t": "json", "v": {"a": 2**70}})
def test_any_json_is_a_value_that_can_be_written_again_or_an_invalid_request(body: Any) -> None:
    for read in (from_lit, from_json):
        try:
            value = read(body)
        except InvalidRequest:
            continue
        msgspec.json.encode(to_lit(value))


@pytest.mark.parametrize("brackets", ["[]", '{"a[":|}', '{"\\\\":[|]}', '{"\\"[":|}'])
def test_json_value_nested_deeper_than_500_levels_is_refused(brackets: str) -> None:
    opening, _, closing = brackets.partition("|") if "|" in brackets else ("[", "", "]")
    levels = len(closing)
    for depth, expected in ((MAX_JSON_DEPTH, True), (MAX_JSON_DEPTH + levels, False), (3 * MAX_JSON_DEPTH, False)):
        text = opening * (depth // levels) + "1" + closing * (depth // levels)
        assert is_json(text) is expected, depth
    assert is_json(f"[{','.join(['[{}]'] * 5_000)}]"), "many brackets, but few levels"


def test_deeply_nested_json_is_a_value_or_an_invalid_request() -> None:
    body: Any = 1
    for _ in range(100_000):
        body = [body]
    with pytest.raises(InvalidRequest):
        from_lit({"t": "json", "v": body})


@pytest.mark.parametrize("body", [None, True, 1, -0.5, "text"])
def test_from_json_accepts_a_plain_scalar_as_its_own_value(body: Any) -> None:
    assert same(from_json(body), body)


@pytest.mark.parametrize("body", [[], [1], 2**63, "\ud800"])
def test_json_that_is_neither_a_literal_nor_a_plain_value_is_refused(body: Any) -> None:
    with pytest.raises(InvalidRequest):
        from_json(body)


@pytest.mark.parametrize(("value", "text"), [("12.3400", "12.3400"), ("1E-3", "0.001"), ("-Infinity", "-Infinity")])
def test_decimal_text_keeps_trailing_zeros_and_expands_exponents(value: str, text: str) -> None:
    assert decimal_text(Decimal(value)) == text


def test_large_document_is_encoded_as_its_own_text_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Json, "value", lambda self: pytest.fail("it was parsed"))
    document = Json("[" + "1e308,\n" * MOST_PARSED + "1]")
    for shown in (to_lit(document)["v"], to_plain(document)):
        assert msgspec.json.encode(shown) == document.text.replace("\n", " ").encode()
