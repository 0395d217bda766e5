"""Keys and Lits as a stranger sends them: what was written once, with bytes changed, cut, doubled and moved.

Either it is refused as an invalid request, or it is a value whose one form it is. `make soak` takes many more.
"""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.model.model_values import INTS, VALUES, same

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.keys.key import Span, decode_key, encode_key
from headwater.model.literal import UNAVAILABLE, Embedding, Json, from_json, from_lit, to_lit

SEED = 20261116
MESSAGE = 4 << 20  # as many bytes as one message of gRPC brings
IN_KEYS = VALUES.filter(lambda value: not isinstance(value, (Embedding, Json)) and value is not UNAVAILABLE)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Return `whole` after a few random mutations."""
    data = draw(whole)
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        data = draw(
            st.sampled_from(
                [
                    data[:at] + data[end:],
                    data[:end] + data[at:],
                    data[:at] + data[at:end][::-1] + data[end:],
                    data[:at] + draw(st.binary(max_size=3)) + data[at:],
                    data[:at] + bytes(byte ^ draw(st.integers(1, 255)) for byte in data[at : at + 1]) + data[at + 1 :],
                ]
            )
        )
    return data


KEY = st.lists(IN_KEYS, max_size=4).map(lambda values: encode_key(tuple(values)))
LIT = VALUES.map(lambda value: msgspec.json.encode(to_lit(value)))


def check_key(data: bytes) -> None:
    """Check that `data` is a key in its one form, or is refused."""
    try:
        values = decode_key(data)
    except InvalidRequest as error:
        assert error.hint
        return
    assert encode_key(values) == data
    assert Span.between(data, data).contains(data)


def check_order(pair: tuple[Any, Any]) -> None:
    """Check that integers and decimals, which Python compares exactly, have the same order as encoded keys."""
    a, b = pair
    wanted = (a > b) - (a < b)
    for before in ((), (None,), ("x",)):
        one, two = encode_key((*before, a)), encode_key((*before, b))
        assert (one > two) - (one < two) == wanted


def check_round(values: list[Any]) -> None:
    """Check that encoded values decode and encode to the same bytes, which begin with those of their first values."""
    written = encode_key(tuple(values))
    back = decode_key(written)
    assert len(back) == len(values) and encode_key(back) == written
    for place in range(len(values) + 1):
        start = encode_key(tuple(values[:place]))
        assert written.startswith(start) and start <= written


def check_lit(data: bytes) -> None:
    """Check that `data` is a value that can be written as a Lit again, or is refused."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return  # not even JSON: nothing for here
    for read in (from_lit, from_json):
        try:
            value = read(body)
        except InvalidRequest as error:
            assert error.hint and not isinstance(error, NotSupported)
            continue
        assert same(from_lit(msgspec.json.decode(msgspec.json.encode(to_lit(value)))), value)


FINITE = st.decimals(allow_nan=False, allow_infinity=False)
CASES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "damaged keys": (damaged(KEY), check_key),
    "any bytes as keys": (st.binary(max_size=64), check_key),
    "the order of integers": (st.tuples(INTS, INTS), check_order),
    "the order of decimals": (st.tuples(FINITE, FINITE), check_order),
    "keys there and back": (st.lists(IN_KEYS, max_size=5), check_round),
    "damaged Lits": (damaged(LIT), check_lit),
    "any bytes as Lits": (st.binary(max_size=64) | st.text(max_size=40).map(str.encode), check_lit),
}


def run(name: str, examples: int, number: int) -> None:
    """Check `examples` cases of one kind."""
    strategy, check = CASES[name]

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Any) -> None:
        check(case)

    one()


@pytest.mark.parametrize("name", CASES)
def test_mutated_keys_and_lits_are_decoded_or_refused(name: str) -> None:
    print(f"seed {SEED}")
    run(name, 100, SEED)


@pytest.mark.soak(seconds=30)
@pytest.mark.parametrize("name", CASES)
def test_many_mutated_keys_and_lits_are_decoded_or_refused(name: str, fresh_number: int) -> None:
    run(name, 20_000, fresh_number)


@pytest.mark.parametrize(
    "data",
    [
        b"\x13\x08\x00" + b"\xff" * MESSAGE,  # a number that has no end
        b"\x11\xf7\xff" + b"\x00" * MESSAGE,  # the same below zero
        b"\x13\x08\x00" + b"\xff" * MESSAGE + b"\0",  # and one that has, far away
        encode_key((-1,)) * 100_000 + b"\xff",
        b"\x05" * 400_000 + b"\xff",
        b"\x30" + b"a" * MESSAGE,
        b"\x23" + b"\xff" * MESSAGE,  # a decimal that has no end
    ],
    ids=["number", "below zero", "far end", "many numbers", "many nulls", "text", "decimal"],
)
def test_decoding_a_message_sized_malformed_key_raises_invalid_request(data: bytes) -> None:
    """A key of 200 kB once blocked the server for 20 seconds, because the rest was copied for every value."""
    with pytest.raises(InvalidRequest):
        decode_key(data)


def test_decoding_a_key_with_an_impossible_number_is_rejected_with_a_hint() -> None:
    with pytest.raises(InvalidRequest, match="not a key") as found:
        decode_key(b"\x13\x04uu\x01\x01\x01\x01\x01\x01\x01 ")
    assert found.value.hint


def test_very_long_key_round_trips() -> None:
    long = (None, *([-7] * 50_000), Decimal("9" * 50_000), "a\0" * 100_000, b"\0\xff" * 100_000)
    assert decode_key(encode_key(long)) == long
