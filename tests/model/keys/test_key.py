"""The key codec against the database itself: byte order is ORDER BY, equal bytes are equal keys."""

import math
import struct
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any
from uuid import UUID

import apsw
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.suite.examples import examples

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.keys.key import Span, decode_key, encode_key, prefix_end
from headwater.model.literal import U64, UNAVAILABLE, Date, DateTime, Embedding, Json, Time

I64_MIN, I64_MAX = -(2**63), 2**63 - 1
EDGE_INTS = [0, 1, -1, 127, 128, 255, 256, I64_MIN, I64_MIN + 1, I64_MAX, I64_MAX - 1]
EDGE_INTS += [sign * (2**53 + near) for sign in (1, -1) for near in (-2, -1, 0, 1, 2)]
EDGE_FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, -5e-324, 2.2250738585072014e-308, 2.225073858507201e-308]
EDGE_FLOATS += [math.inf, -math.inf, 1.7976931348623157e308, 2.0**53, 2.0**63, -(2.0**63), 9.2e18, 1e19]
EDGE_TEXTS = [
    "",
    " ",
    "a",
    "A",
    "a ",
    "a\0",
    "a\0b",
    "A\0B",
    "a\0c",
    "\0",
    "\x01",
    "ab",
    "aB",
    "_",
    "z",
    "Z",
    "é",
    "É",
]
EDGE_TEXTS += ["\uffff", "\U0001f600", "\udcff", "a\udc80", "İ"]
EDGE_BLOBS = [b"", b"\0", b"\0\0", b"\0\x01", b"\0\xff", b"\xff", b"\xff\xff", b"a", b"a\0b"]

INTS = st.sampled_from(EDGE_INTS) | st.integers(I64_MIN, I64_MAX) | st.integers(-300, 300)
FLOATS = st.sampled_from(EDGE_FLOATS) | st.floats(allow_nan=False)
CHARS = st.sampled_from(list("aAbBzZ_ \0\x01é\uffff\U0001f600") + ["\udc80", "\udcff"])
TEXTS = st.sampled_from(EDGE_TEXTS) | st.text(CHARS, max_size=5)
BLOBS = st.sampled_from(EDGE_BLOBS) | st.binary(max_size=5)
VALUES = st.none() | st.booleans() | INTS | FLOATS | TEXTS | BLOBS
COLLATIONS = st.sampled_from(["BINARY", "NOCASE", "RTRIM"])


def near(value: int) -> st.SearchStrategy[Any]:
    """Return a strategy for integers and doubles close to `value`."""
    double = float(value)
    doubles = [double, math.nextafter(double, math.inf), math.nextafter(double, -math.inf)]
    ints = [n for n in (value - 1, value, value + 1) if I64_MIN <= n <= I64_MAX]
    return st.sampled_from([*ints, *doubles])


class Database:
    """SQLite, which compares keys as the database does."""

    def __init__(self) -> None:
        self.connection = apsw.Connection(":memory:")

    def stored(self, value: Any) -> tuple[str, Any]:
        """SQL text and binding that give exactly `value`, broken text as its raw bytes."""
        if isinstance(value, str):
            return "CAST(? AS TEXT)", value.encode("utf-8", "surrogateescape")
        return "?", int(value) if isinstance(value, bool) else value

    def compare(self, a: Any, b: Any, collation: str = "BINARY") -> int:
        """-1, 0 or 1, as ORDER BY has it."""
        (left, x), (right, y) = self.stored(a), self.stored(b)
        if self.connection.execute(f"SELECT {left} IS {right} COLLATE {collation}", (x, y)).get:
            return 0
        both = f"SELECT {left} AS v, -1 AS n UNION ALL SELECT {right}, 1"
        first = self.connection.execute(f"SELECT n FROM ({both}) ORDER BY v COLLATE {collation} LIMIT 1", (x, y))
        return int(first.get)

    def order(self, keys: list[tuple[Any, ...]], collations: list[str]) -> list[int]:
        """The places of `keys` as ORDER BY puts them, equals by place."""
        width = len(collations)
        names = [f"c{place}" for place in range(width)]
        self.connection.execute("DROP TABLE IF EXISTS t")
        declared = ", ".join(f"{n} COLLATE {c}" for n, c in zip(names, collations, strict=True))
        self.connection.execute(f"CREATE TABLE t(place INTEGER PRIMARY KEY, {declared})")
        for place, key in enumerate(keys):
            parts = [self.stored(value) for value in key]
            marks = ", ".join(["?", *(mark for mark, _ in parts)])
            self.connection.execute(f"INSERT INTO t VALUES ({marks})", (place, *(bound for _, bound in parts)))
        found = self.connection.execute(f"SELECT place FROM t ORDER BY {', '.join(names)}, place")
        return [place for (place,) in found]

    def equal_pairs(self, collations: list[str]) -> set[tuple[int, int]]:
        """The pairs of places in the table of `order` whose keys the database calls equal."""
        same = " AND ".join(f"x.c{place} IS y.c{place}" for place in range(len(collations)))
        return set(self.connection.execute(f"SELECT x.place, y.place FROM t x, t y WHERE {same}"))


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    found = Database()
    yield found
    found.connection.close()


def sign(a: bytes, b: bytes) -> int:
    return (a > b) - (a < b)


@given(VALUES, VALUES)
@examples(400)
@example(2**53 + 1, 2.0**53)
@example(0.0, -0.0)
@example(I64_MAX, 2.0**63)
def test_two_key_values_compare_as_the_database_compares_them(database: Database, a: Any, b: Any) -> None:
    assert sign(encode_key((a,)), encode_key((b,))) == database.compare(a, b)


@pytest.mark.parametrize("values", [EDGE_INTS + EDGE_FLOATS, EDGE_BLOBS + [None, 0, ""]])
def test_edge_values_compare_as_the_database_compares_them(database: Database, values: list[Any]) -> None:
    for a, b in product(values, values):
        assert sign(encode_key((a,)), encode_key((b,))) == database.compare(a, b), (a, b)


@pytest.mark.parametrize("collation", ["BINARY", "NOCASE", "RTRIM", "nocase"])
def test_edge_texts_compare_as_the_collation_compares_them(database: Database, collation: str) -> None:
    for a, b in product(EDGE_TEXTS, EDGE_TEXTS):
        ours = sign(encode_key((a,), [collation]), encode_key((b,), [collation]))
        assert ours == database.compare(a, b, collation), (a, b)


@given(TEXTS, TEXTS, COLLATIONS)
@examples(300)
def test_texts_compare_as_their_collation_compares_them(database: Database, a: str, b: str, collation: str) -> None:
    ours = sign(encode_key((a,), [collation]), encode_key((b,), [collation]))
    assert ours == database.compare(a, b, collation)


@given(
    st.sampled_from([0, 2**52, 2**53, -(2**53), 2**62, 2**63, -(2**63), 3 * 2**60]).flatmap(
        lambda value: st.tuples(near(value), near(value))
    )
)
def test_integers_and_doubles_compare_exactly(database: Database, pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert sign(encode_key((a,)), encode_key((b,))) == database.compare(a, b)
    assert sign(encode_key((a,)), encode_key((b,))) == (Fraction(a) > Fraction(b)) - (Fraction(a) < Fraction(b))


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows of one width, with few distinct values so that ties are broken by the later columns."""
    collations = draw(st.lists(COLLATIONS, min_size=1, max_size=3))
    pool = draw(st.lists(VALUES, min_size=1, max_size=5))
    row = st.tuples(*[st.sampled_from(pool) | VALUES for _ in collations])
    return draw(st.lists(row, min_size=1, max_size=12)), collations


@pytest.mark.slow
@given(tables())
@examples(150)
def test_composite_keys_order_and_equal_as_in_the_database(
    database: Database, table: tuple[list[tuple[Any, ...]], list[str]]
) -> None:
    keys, collations = table
    written = [encode_key(key, collations) for key in keys]
    places = range(len(keys))
    assert sorted(places, key=lambda place: (written[place], place)) == database.order(keys, collations)
    ours = {(a, b) for a in places for b in places if written[a] == written[b]}
    assert ours == database.equal_pairs(collations)


@given(tables())
@examples(100)
def test_decoded_values_are_equal_in_the_database(
    database: Database, table: tuple[list[tuple[Any, ...]], list[str]]
) -> None:
    keys, collations = table
    back = [decode_key(encode_key(key, collations)) for key in keys]
    database.order([*keys, *back], collations)
    pairs = database.equal_pairs(collations)
    assert all((place, place + len(keys)) in pairs for place in range(len(keys)))


@given(st.lists(VALUES, max_size=4))
def test_decoded_values_encode_to_the_same_bytes(values: list[Any]) -> None:
    written = encode_key(tuple(values))
    assert encode_key(decode_key(written)) == written


DECIMALS = st.decimals(allow_nan=False, allow_infinity=True) | st.builds(
    lambda digits, scale: Decimal(digits).scaleb(scale), st.integers(-9999, 9999), st.integers(-30, 30)
)


@given(DECIMALS, DECIMALS)
@examples(300)
@example(Decimal("1.0"), Decimal("1.00"))
@example(Decimal("-0"), Decimal("0E+9"))
@example(Decimal("1E-1000"), Decimal("0"))
def test_decimals_compare_as_numbers(a: Decimal, b: Decimal) -> None:
    assert sign(encode_key((a,)), encode_key((b,))) == (a > b) - (a < b)


@given(DECIMALS)
def test_decimal_keys_round_trip_exactly(value: Decimal) -> None:
    (back,) = decode_key(encode_key((value,)))
    assert isinstance(back, Decimal)
    assert back == value


@given(st.integers(0, 2**64 - 1), INTS | FLOATS)
def test_unsigned_integer_keys_sort_among_all_numbers(big: int, other: Any) -> None:
    ours = sign(encode_key((U64(big),)), encode_key((other,)))
    assert ours == (big > other) - (big < other)


@given(st.integers(0, 2**64 - 1))
def test_unsigned_integer_keys_round_trip_as_the_same_number(big: int) -> None:
    (back,) = decode_key(encode_key((U64(big),)))
    assert (back.v if isinstance(back, U64) else back) == big


@given(st.uuids(), st.uuids())
def test_uuid_keys_sort_by_their_bytes_and_round_trip(a: UUID, b: UUID) -> None:
    assert sign(encode_key((a,)), encode_key((b,))) == sign(a.bytes, b.bytes)
    assert decode_key(encode_key((a, b))) == (a, b)


def test_what_the_database_stores_as_the_same_value_has_the_same_bytes() -> None:
    assert encode_key((True,)) == encode_key((1,)) == encode_key((1.0,)) == encode_key((U64(1),))
    for value in (Date("2026-01-18"), Time("12:00"), DateTime("2026-01-18T12:00:00Z")):
        assert encode_key((value,)) == encode_key((value.iso,))


def test_encoded_keys_sort_null_then_numbers_decimals_text_uuid_bytes() -> None:
    numbers = [-math.inf, -1, 0, 1, math.inf, math.nan]
    ladder = [
        None,
        *numbers,
        *map(Decimal, numbers),
        "",
        "z",
        UUID(int=0),
        UUID(int=2**128 - 1),
        b"",
        b"\xff",
    ]
    written = [encode_key((value,)) for value in ladder]
    assert written == sorted(written)
    assert len(set(written)) == len(written)


def test_nan_keys_with_different_bits_are_equal() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert encode_key((math.nan,)) == encode_key((odd,))
    assert encode_key((Decimal("NaN"),)) == encode_key((Decimal("-sNaN"),))
    (back,) = decode_key(encode_key((odd,)))
    assert isinstance(back, float)
    assert math.isnan(back)


def test_key_encoding_matches_pinned_bytes_and_decodes_them() -> None:
    # Clients and cursors keep them: a failure here breaks what is already out there.
    key = (None, -1, 0, 2**53 + 1, 0.1, Decimal("-1.23"), "a\0b", UUID(int=1), b"\xff")
    pinned = """
        05 11fbccff 12 1304680101010101010110 13042f99cd673399cd6740 217fffffffe6c3
        306100ff620001 3800000000000000000000000000000001 40ff0001
    """
    assert encode_key(key) == bytes.fromhex(pinned)
    assert decode_key(bytes.fromhex(pinned)) == key


@pytest.mark.parametrize("value", [Json("{}"), Embedding((1.0,)), UNAVAILABLE])
def test_values_without_an_order_are_refused(value: Any) -> None:
    with pytest.raises(NotSupported, match="has no place in a key"):
        encode_key((value,))


def test_key_with_an_unsupported_collation_raises_not_supported_with_a_hint() -> None:
    with pytest.raises(NotSupported, match="collation 'de_DE'") as caught:
        encode_key(("a", "b"), ["BINARY", "de_DE"])
    assert caught.value.hint


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400, "\ud800", Decimal("1E+3000000000")])
def test_values_outside_every_database_type_are_refused_as_keys(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        encode_key((value,))


@given(st.binary(max_size=24) | st.builds(lambda t, b: bytes([t]) + b, st.integers(0, 0x41), st.binary(max_size=12)))
@examples(500)
@example(b"\x13\xff\xff\x00")
@example(b"\x23\xff\xff\xff\xff\xf0")
def test_random_bytes_are_a_canonical_key_or_an_invalid_request(data: bytes) -> None:
    try:
        values = decode_key(data)
    except InvalidRequest:
        return
    assert encode_key(values) == data


# --- spans -----------------------------------------------------------------------------------------------

KEYS = st.lists(st.sampled_from([None, 1, 2, "a", "a\0b", "b", b"\xff"]), max_size=3).map(tuple)
BYTES = st.binary(max_size=3)
SPANS = st.builds(Span, BYTES, st.none() | BYTES)


@given(BYTES, BYTES)
def test_prefix_end_is_the_exclusive_upper_bound_of_keys_with_that_prefix(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    assert key.startswith(prefix) == (prefix <= key and (end is None or key < end))


@given(KEYS, KEYS)
def test_span_between_equal_prefixes_contains_exactly_the_keys_with_that_prefix(
    prefix: tuple[Any, ...], key: tuple[Any, ...]
) -> None:
    inside = Span.between(encode_key(prefix), encode_key(prefix)).contains(encode_key(key))
    assert inside == (key[: len(prefix)] == prefix)


@given(KEYS, KEYS, KEYS)
def test_span_between_two_keys_includes_both_bounds(
    low: tuple[Any, ...], high: tuple[Any, ...], key: tuple[Any, ...]
) -> None:
    written = encode_key(key)
    starts_high = key[: len(high)] == high
    expected = encode_key(low) <= written and (written <= encode_key(high) or starts_high)
    try:
        assert Span.between(encode_key(low), encode_key(high)).contains(written) == expected
    except InvalidRequest:
        assert encode_key(low) > encode_key(high)


def test_span_without_a_start_or_end_is_unbounded_on_that_side() -> None:
    assert Span.between(None, None) == Span.all() == Span.between(encode_key(()), encode_key(()))
    assert Span.between(encode_key((2,)), None).contains(encode_key((2,)))
    assert not Span.between(None, encode_key((2,))).contains(encode_key((3,)))


def test_span_with_bounds_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lower bound is above"):
        Span.between(encode_key((2,)), encode_key((1,)))


def test_span_bounds_are_compared_by_the_collation() -> None:
    prefix = encode_key(("ABC",), ["NOCASE"])
    assert Span.between(prefix, prefix).contains(encode_key(("abc", 1), ["NOCASE", "BINARY"]))


@given(SPANS, SPANS, BYTES)
def test_span_intersection_contains_exactly_the_keys_in_both_spans(a: Span, b: Span, key: bytes) -> None:
    both = a.intersect(b)
    assert (both is not None and both.contains(key)) == (a.contains(key) and b.contains(key))
    assert a.overlaps(b) == b.overlaps(a) == (both is not None)
