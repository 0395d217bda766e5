"""A backtest reports the same changes that a subscription would have delivered."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.feeds.feed_database import FILTERS, WITHOUT_SIZE, Fed, Writer, insert

from headwater.errors import InvalidRequest, LimitExceeded, OffsetExpired
from headwater.feeds import backtest as backtest_module
from headwater.feeds.backtest import backtest
from headwater.feeds.subscription_requests import Subscriptions
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable
from headwater.model.change import Change, Op
from headwater.model.principal import Principal

ANN = Principal("ann", "viewer")


class Only:
    """A set of databases that has one open database."""

    def __init__(self, fed: Fed) -> None:
        self._fed = fed

    def database(self, name: str) -> Fed:
        return self._fed

    def names(self) -> list[str]:
        return ["main"]


@pytest.mark.parametrize("given", FILTERS)
@pytest.mark.parametrize("after", [0, 17])
def test_backtest_counts_equal_the_pages(given: dict[str, Any], after: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "complete": True,
    }


def test_backtest_without_changes_to_scan_is_complete() -> None:
    fed = Fed()
    assert backtest(fed.log, fed.view(), after=0) == {
        "matches": 0,
        "bytes": 0,
        "samples": [],
        "ops": {},
        "scanned": 0,
        "from_offset": 0,
        "upto_offset": 0,
        "complete": True,
    }


def test_backtest_ends_at_the_head_when_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed()
    fed.commit(insert(0), insert(1))
    monkeypatch.setattr(backtest_module, "PAGE", 1)
    monkeypatch.setattr(backtest_module.time, "sleep", lambda seconds: fed.commit(insert(fed.log.latest + 5)))
    assert backtest(fed.log, fed.view(), after=0)["upto_offset"] == 2


def test_backtest_raises_for_evicted_offsets_and_unfitting_filters() -> None:
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


# --- limits ----------------------------------------------------------------------------------------------


def test_backtest_returns_a_partial_result_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed()
    for id in range(6):
        fed.commit(insert(id))
    monkeypatch.setattr(backtest_module, "PAGE", 2)
    ticks = iter([0.0, 4.0, 10.0])
    found = backtest(fed.log, fed.view(), after=0, clock=lambda: next(ticks))
    assert (found["complete"], found["matches"], found["scanned"], found["upto_offset"]) == (False, 4, 4, 4)


def test_backtest_is_complete_if_its_last_page_ends_at_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed()
    fed.commit(insert(1))
    ticks = iter([0.0, 99.0])
    assert backtest(fed.log, fed.view(), after=0, clock=lambda: next(ticks))["complete"]


def test_one_backtest_runs_at_a_time_unless_it_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed()
    fed.commit(insert(1))
    with closing(Registry.open(tmp_path / "subscriptions.db")) as registry:
        subscriptions = Subscriptions(Only(fed), registry)
        seen: list[Any] = []

        def meanwhile(seconds: float) -> None:
            with pytest.raises(LimitExceeded) as refused:
                subscriptions.backtest(ANN, SubscribeTable(table="items"))
            seen.append(refused.value.hint)
            seen.append(subscriptions.backtest(ANN, SubscribeTable(table="items", start="latest"))["from_offset"])

        monkeypatch.setattr(backtest_module.time, "sleep", meanwhile)
        assert subscriptions.backtest(ANN, SubscribeTable(table="items"))["matches"] == 1
        assert "again" in seen[0] and seen[1] == 1
        monkeypatch.undo()
        assert subscriptions.backtest(ANN, SubscribeTable(table="items"))["complete"], "its turn is over"
