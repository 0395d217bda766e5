"""The validators of query watchers report their violations and accept a correct journal."""

from __future__ import annotations

from typing import Any

import pytest
from tests.guarantees.feed_journal import BEGIN, CHANGE, CHECKPOINT, LOST, REACHED, Entry
from tests.guarantees.feed_oracle import Expected, Spec, Truth
from tests.guarantees.test_feed_validators import HISTORY
from tests.guarantees.watchers import ANSWER, LOOKED, SAME, validate_watcher

# SELECT id, n FROM t WHERE n > 30 ORDER BY id: nothing, 3: row 2, 4: 1 and 2, 6: 9 in place of both, 8: 2 and 9
TRUTH = Truth(HISTORY)
WATCHED = Expected(TRUTH, Spec(tables=("t",), columns=("id", "n"), condition="n > 30", query="…"))


def rows(*pairs: tuple[int, int]) -> list[Any]:
    return [[{"t": "i64", "v": value} for value in pair] for pair in pairs]


def stale(offset: int, tag: str = "") -> Entry:
    return Entry(CHANGE, offset, {"etag": tag or f"t{offset}"})


LAST = rows((2, 60), (9, 41))
TOLD = [Entry(BEGIN, 0), stale(3), stale(4), Entry(CHECKPOINT, 4), stale(6), stale(8), Entry(CHECKPOINT, 8)]


@pytest.mark.parametrize(
    "journal",
    [
        TOLD,
        [*TOLD, Entry(BEGIN, 4), stale(6), stale(8), Entry(CHECKPOINT, 8)],  # once more from an older place
        [Entry(ANSWER, 3, rows((2, 50))), Entry(BEGIN, 3), stale(4), Entry(REACHED, 4)],
        [Entry(BEGIN, 3), Entry(LOST), Entry(BEGIN, 6), Entry(REACHED, 6)],
        [Entry(BEGIN, 4), Entry(REACHED, 5), stale(6)],  # inside a transaction, before the change that matters last
        [Entry(LOOKED, 0, ("t4", rows((1, 40), (2, 50)))), *TOLD],
        [*TOLD[:4], Entry(SAME, 4, ("t4", rows((1, 40), (2, 50))))],
        [*TOLD[:3], Entry(SAME, 3, ("t4", rows((1, 40), (2, 50))))],
        [*TOLD, Entry(LOOKED, 8, ("", rows((7, 77))))],  # no tag: it promises nothing
    ],
)
def test_valid_watcher_journal_passes(journal: list[Entry]) -> None:
    assert validate_watcher(journal, WATCHED) == []


@pytest.mark.parametrize(
    ("journal", "named"),
    [
        ([*TOLD[:2], *TOLD[3:]], "nobody said so"),
        ([*TOLD[:-2], TOLD[-1]], "nobody said so"),
        ([Entry(BEGIN, 4), Entry(REACHED, 6)], "nobody said so"),
        ([*TOLD, stale(8)], "8 follows 8"),
        ([Entry(ANSWER, 3, rows((1, 40))), Entry(BEGIN, 3)], "whose tag stands at 3"),
        ([*TOLD, Entry(LOOKED, 8, ("t4", LAST))], "t4 was said to be the answer at 4"),
        ([Entry(LOOKED, 0, ("x", LAST)), Entry(LOOKED, 0, ("x", rows((1, 40), (2, 50)))), *TOLD], "two answers"),
        ([*TOLD, Entry(LOOKED, 8, ("t4", rows((1, 40), (2, 50))))], "an answer from before 8"),
        ([*TOLD, Entry(SAME, 8, ("t4", rows((1, 40), (2, 50))))], "a 304"),
        ([*TOLD, Entry(SAME, 8, ("t0", rows()))], "a 304"),
        ([], "never was told"),
    ],
)
def test_invalid_watcher_journal_is_reported(journal: list[Entry], named: str) -> None:
    found = validate_watcher(journal, WATCHED)
    assert found and named in found[0], found
