"""Token buckets: requests stay within rate and burst, and the number of buckets is bounded."""

import random

import pytest

from headwater.serve.limits.rates import Buckets, place_of, too_often


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def buckets(rate: float, burst: int, most: int = 100) -> tuple[Buckets, Clock]:
    clock = Clock()
    return Buckets(rate, burst, most=most, clock=clock), clock


def test_requests_beyond_the_burst_wait_for_a_token_each() -> None:
    found, clock = buckets(10, 3)
    assert [found.take("a") for _ in range(3)] == [0, 0, 0]
    wait = found.take("a")
    assert wait == pytest.approx(0.1)
    assert found.take("a") == pytest.approx(0.1), "a refusal costs nothing"
    clock.now += wait
    assert found.take("a") == 0 and found.take("a") > 0
    clock.now += 100
    assert [found.take("a") for _ in range(3)] == [0, 0, 0] and found.take("a") > 0


def test_each_key_has_its_own_bucket() -> None:
    found, _ = buckets(1, 1)
    assert [found.take("a"), found.take("b")] == [0, 0]
    assert found.take("a") > 0 and found.take("b") > 0


@pytest.mark.parametrize("seed", range(20))
def test_requests_in_any_interval_stay_within_rate_and_burst(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    rate, burst = chance.choice([0.5, 3, 50]), chance.randint(1, 8)
    found, clock = buckets(rate, burst)
    granted: list[float] = []
    for _ in range(600):
        clock.now += chance.choice([0, 0, 0, chance.expovariate(rate), chance.random() * 5 / rate])
        if not found.take("a"):
            granted.append(clock.now)
    for place, since in enumerate(granted):
        upto = place + chance.randint(0, 40)
        stretch = granted[place : upto + 1]
        assert len(stretch) <= burst + rate * (stretch[-1] - since) + 1e-6
    assert len(granted) > burst


def test_full_buckets_are_evicted_first() -> None:
    found, clock = buckets(1, 5, most=10)
    for n in range(9):
        found.take(n)
    clock.now += 2
    for _ in range(5):
        found.take("busy")
    for n in range(100, 105):
        found.take(n)
    assert len(found._full) <= 10 and found.take("busy") > 0, "who asks now is not forgotten for those who asked before"


def test_number_of_buckets_is_bounded() -> None:
    found, _ = buckets(1, 5, most=10)
    for n in range(1000):
        assert found.take(n) == 0
        assert len(found._full) <= 10


def test_rate_limit_error_has_the_wait_time() -> None:
    error = too_often("by 'a'", 0.5, 1.2304, "Ask less.")
    assert error.extra["retry_after_ms"] == 1231 and "1231" in error.hint and "0.5" in error.message
    assert too_often("", 1, 1e-9, "").extra["retry_after_ms"] == 1


def test_ipv6_address_counts_as_its_network() -> None:
    assert place_of("10.0.0.1") == "10.0.0.1"
    assert place_of("2001:db8:1:2:3::4") == place_of("2001:db8:1:2::9") != place_of("2001:db8:1:3::9")
    assert place_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert place_of("fe80::1%eth0") == place_of("fe80::2")
    assert place_of("") == "" and place_of("unix") == "unix"
