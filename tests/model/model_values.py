"""Random values of every kind, shared by the tests of this room."""

import math
from decimal import Decimal

from hypothesis import strategies as st

from headwater.model.literal import U64, UNAVAILABLE, Date, DateTime, Embedding, Json, Time

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ANY_JSON = st.recursive(
    JSON | st.floats() | st.integers() | st.sampled_from([2**70, -(2**70), 10**400, 1e300, "\ud800", "\udc80"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
INTS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 2**53, 2**53 + 1, -(2**53) - 1])
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324])
DECIMALS = st.builds(
    lambda digits, scale: Decimal(digits).scaleb(scale), st.integers(-(10**20), 10**20), st.integers(-30, 30)
) | st.sampled_from([Decimal("12.3400"), Decimal("-0.00"), Decimal("NaN"), Decimal("Infinity"), Decimal("-Infinity")])
BROKEN = st.binary(min_size=1, max_size=6).map(lambda data: data.decode("utf-8", "surrogateescape"))
TIMES = st.times().map(lambda time: Time(time.isoformat()))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    INTS,
    st.integers(0, 2**64 - 1).map(U64),
    FLOATS,
    DECIMALS,
    st.text(max_size=8),
    BROKEN,
    st.binary(max_size=8),
    st.dates().map(lambda date: Date(date.isoformat())),
    TIMES,
    st.datetimes().map(lambda when: DateTime(when.isoformat())),
    st.uuids(),
    st.builds(
        Embedding,
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4).map(tuple),
        st.none() | st.text(max_size=5),
    ),
    st.sampled_from(["{}", "[1, 2.5]", '"x"', "null", '{"a":{"b":[true]}}']).map(Json),
    st.just(UNAVAILABLE),
)


def same(a: object, b: object) -> bool:
    """Equal, of one type, and digit for digit: NaN is itself, 0.0 is not -0.0, 1.0 is not 1.00."""
    if isinstance(a, (float, Decimal)):
        return type(a) is type(b) and repr(a) == repr(b)
    return type(a) is type(b) and a == b
