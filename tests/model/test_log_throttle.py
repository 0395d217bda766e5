"""Repeated messages are logged at most once a minute, with the number of dropped ones."""

from headwater.model.work.log_throttle import MOST, LogThrottle, counted


def test_first_message_is_logged_then_one_a_minute_with_a_count() -> None:
    repeats = LogThrottle()
    assert [repeats.again("stopped", at) for at in (0, 1, 30, 59.9, 60, 61, 200)] == [0, None, None, None, 3, None, 1]


def test_another_kind_is_logged_immediately() -> None:
    repeats = LogThrottle()
    assert [repeats.again(kind, 1) for kind in ("a", "b", "a", "b")] == [0, 0, None, None]


def test_number_of_remembered_kinds_is_limited() -> None:
    repeats = LogThrottle()
    for number in range(10 * MOST):
        assert repeats.again(str(number), 1) == 0
    assert len(repeats._logged) <= MOST


def test_throttled_message_appends_the_suppressed_count_only_when_above_zero() -> None:
    assert counted("it stopped", 0) == "it stopped"
    assert counted("it stopped", 3) == "it stopped (and 3 more since the last such message)"
