"""Patches for a client that sends the keys of its rows; inexact modes are rejected."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.queries.patch.patch_application import apply

from headwater.errors import HeadwaterError, InvalidRequest, NotSupported
from headwater.model.literal import to_lit
from headwater.queries.patch.client_state import ClientState, HeldRow, diff_state, fingerprint
from headwater.queries.patch.patch import Answer

COLUMNS = ({"name": "id"}, {"name": "v"})
ROWS = st.dictionaries(st.integers(0, 9), st.sampled_from([0, 1, 1.0, "1", None])).flatmap(
    lambda rows: st.permutations([*rows.items()])
)


def answer(rows: Any, key: tuple[int, ...] | None = (0,)) -> Answer:
    return Answer.of('"p.2"', COLUMNS, rows, key=key)


def state(held: Answer, mode: str = "strict") -> ClientState:
    """Return the state that a client with the rows `held` sends."""
    pks = [json.loads(held.key_of(place)) for place in range(len(held.texts))]
    fps = [fingerprint(text) if mode == "strict" else None for text in held.texts]
    return ClientState(mode, [HeldRow(pk, fp) for pk, fp in zip(pks, fps, strict=True)])


@given(ROWS, ROWS)
def test_patch_of_a_strict_client_state_gives_the_answer(old: Any, new: Any) -> None:
    held, fresh = answer(old), answer(new)
    found = diff_state(state(held), fresh, '"p.1"')
    assert found["base_source"] == "client_state" and "partial" not in found
    assert apply(msgspec.json.encode(found), held.texts) == [*fresh.texts]
    assert not {bytes(one["row"]) for one in found["updated"]} & {*held.texts}  # what is the same is not sent


@pytest.mark.slow
@given(ROWS, ROWS)
def test_patch_of_a_client_state_of_keys_gives_the_keys_in_order(old: Any, new: Any) -> None:
    held, fresh = answer(old), answer(new)
    found = diff_state(state(held, "membership_only"), fresh)
    assert found["partial"] is True and found["updated_unknown"] is True and found["updated"] == []
    kept = dict(old)
    before = answer([(key, kept.get(key, value)) for key, value in new])  # the answer, had nothing been updated
    sent = msgspec.json.encode(found | {"result_hash": before.hash})
    assert apply(sent, held.texts) == [*before.texts]


def one(pk: Any, fp: Any = "0" * 32) -> HeldRow:
    return HeldRow(pk, fp)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (ClientState("add_only", []), NotSupported),
        (ClientState("strict", [], keys_bloom={"m_bits": 8}), NotSupported),
        (ClientState("membership", []), InvalidRequest),
        (ClientState("strict"), InvalidRequest),
        (ClientState("strict", [one([to_lit(1)], None)]), InvalidRequest),
        (ClientState("strict", [one([to_lit(1)], "XY")]), InvalidRequest),
        (ClientState("strict", [one([to_lit(1), to_lit(2)])]), InvalidRequest),
        (ClientState("strict", [one([1])]), InvalidRequest),
        (ClientState("strict", [one([to_lit(1)]), one([to_lit(1)], "1" * 32)]), InvalidRequest),
    ],
)
def test_unsupported_client_state_is_rejected_by_name(said: ClientState, error: type[HeadwaterError]) -> None:
    with pytest.raises(error):
        diff_state(said, answer([(1, "a")]))


def test_client_state_of_an_answer_without_a_key_is_not_supported() -> None:
    with pytest.raises(NotSupported, match="key"):
        diff_state(ClientState("strict", []), answer([(1, "a")], key=None))
