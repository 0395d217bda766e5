"""Retries: waits with full jitter, an end after a time without progress, and the server's Retry-After."""

import random

import pytest

from headwater.client.retry import FIRST_WAIT, LONGEST_WAIT, Backoff
from headwater.errors import Unavailable


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Highest(random.Random):
    """A random source that returns the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


ERROR = Unavailable("gone")


def test_retry_waits_double_up_to_a_limit() -> None:
    backoff = Backoff(1000, Highest(), Clock())
    waits = [backoff.wait(ERROR) for _ in range(9)]
    assert waits == [min(FIRST_WAIT * 2**n, LONGEST_WAIT) for n in range(9)]
    assert waits[-1] == LONGEST_WAIT


def test_retry_jitter_covers_zero_to_the_limit() -> None:
    found = []
    for seed in range(200):
        backoff = Backoff(1000, random.Random(seed), Clock())
        found.append([backoff.wait(ERROR) for _ in range(4)][-1])
    bound = FIRST_WAIT * 8
    assert 0 <= min(found) < bound / 10 and bound * 0.9 < max(found) <= bound


def test_backoff_raises_the_last_error_after_its_patience() -> None:
    clock = Clock()
    backoff = Backoff(10, Highest(), clock)
    backoff.wait(Unavailable("first"))
    clock.now += 9.9
    with pytest.raises(Unavailable, match="last"):
        backoff.wait(Unavailable("last"))


def test_patience_is_counted_from_the_first_failure_and_reset_by_progress() -> None:
    clock = Clock()
    backoff = Backoff(10, Highest(), clock)
    clock.now += 3600  # all went well for an hour
    assert backoff.wait(ERROR) == FIRST_WAIT
    clock.now += 9
    assert backoff.wait(ERROR) == FIRST_WAIT * 2
    backoff.progress()
    clock.now += 9
    assert backoff.wait(ERROR) == FIRST_WAIT


def test_retry_after_of_the_server_is_waited() -> None:
    assert Backoff(60, Highest(), Clock()).wait(Unavailable("full", retry_after=7)) == 7


def test_zero_patience_raises_the_first_error() -> None:
    with pytest.raises(Unavailable):
        Backoff(0, Highest(), Clock()).wait(ERROR)
