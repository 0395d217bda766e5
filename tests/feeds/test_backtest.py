"""A backtest tells what a subscription would have delivered: the same as reading it does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.feeds.fed import FILTERS, WITHOUT_SIZE, Fed, Writer, insert

from headwater.errors import InvalidRequest, OffsetExpired
from headwater.feeds import backtest as backtest_module
from headwater.feeds.backtest import backtest
from headwater.model.change import Change, Op


@pytest.mark.parametrize("given", FILTERS)
@pytest.mark.parametrize("after", [0, 17])
def test_it_counts_what_reading_finds(given: dict[str, Any], after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backtest_module, "PAGE", 7)
    monkeypatch.setattr(backtest_module, "BREATH_SECONDS", 0.0)
    fed = Fed()
    Writer(fed, 3).write(60)
    view = fed.view(**given)
    expected = fed.expected(view, after=after)
    found = backtest(fed.log, view, after=after)
    assert [bytes(sample) for sample in found.pop("samples")] == [one.data for one in expected[-5:]]
    assert found == {
        "matches": len(expected),
        "bytes": sum(len(one.data) for one in expected),
        "ops": Counter(one.op.word for one in expected),
        "scanned": fed.log.latest - after,
        "from_offset": after,
        "upto_offset": fed.log.latest,
    }


def test_nothing_to_look_at_is_an_answer_too() -> None:
    fed = Fed()
    assert backtest(fed.log, fed.view(), after=0) == {
        "matches": 0,
        "bytes": 0,
        "samples": [],
        "ops": {},
        "scanned": 0,
        "from_offset": 0,
        "upto_offset": 0,
    }


def test_it_ends_where_the_log_was_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed()
    fed.commit(insert(0), insert(1))
    monkeypatch.setattr(backtest_module, "PAGE", 1)
    monkeypatch.setattr(backtest_module.time, "sleep", lambda seconds: fed.commit(insert(fed.log.latest + 5)))
    assert backtest(fed.log, fed.view(), after=0)["upto_offset"] == 2


def test_past_the_horizon_and_beyond_a_shape_that_does_not_fit_it_says_why_not() -> None:
    fed = Fed()
    for id in range(5):
        fed.commit(insert(id))
    fed.log.flush()
    fed.trim(2)
    with pytest.raises(OffsetExpired):
        backtest(fed.log, fed.view(), after=0)
    fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
    fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (9, "")))
    with pytest.raises(InvalidRequest, match="does not fit"):
        backtest(fed.log, fed.view(tables=("items",), where="size = 1"), after=3)
