"""Reading rows of SQLite without keeping other threads from the interpreter."""

import apsw
import pytest

from headwater.sources.sqlite import row_fetch

HUNDRED = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100) SELECT x FROM c"


class Clock:
    """A clock that moves by `step` seconds whenever it is read, and records the pauses."""

    def __init__(self, step: float) -> None:
        self._now, self._step = 0.0, step
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        self._now += self._step
        return self._now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def test_reading_longer_than_a_turn_pauses_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(row_fetch.TURN / 10)
    monkeypatch.setattr(row_fetch, "time", clock)
    rows = list(row_fetch.paced(apsw.Connection(":memory:").execute(HUNDRED)))
    assert rows == [(value,) for value in range(1, 101)]
    assert 8 <= len(clock.pauses) <= 10


def test_short_reading_makes_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0)
    monkeypatch.setattr(row_fetch, "time", clock)
    assert len(list(row_fetch.paced(apsw.Connection(":memory:").execute(HUNDRED)))) == 100
    assert clock.pauses == []
