"""The error tree: every error knows its code and its status on each wire."""

import inspect
import re

import pytest

from headwater import errors
from headwater.errors import HeadwaterError, OffsetExpired

GRPC = {"CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"}
GRPC |= {"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"}
GRPC |= {"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}
ALL = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, HeadwaterError)]


def test_every_error_class_defines_its_own_unique_code() -> None:
    assert len({each.code for each in ALL}) == len(ALL)


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_a_docstring_a_status_and_a_grpc_status(error: type[HeadwaterError]) -> None:
    assert "__doc__" in vars(error)
    assert (inspect.getdoc(error) or "").endswith(".")
    assert 400 <= error.status < 600
    assert error.grpc_status in GRPC
    assert re.fullmatch(r"[a-z_]+", error.code)


def test_only_temporary_errors_are_retryable() -> None:
    assert {each.__name__ for each in ALL if each.retryable} == {
        "Busy",
        "LimitExceeded",
        "SourceError",
        "StorageFull",
        "TxExpired",
        "Unavailable",
    }


def test_error_details_contain_hint_retryable_and_the_given_fields() -> None:
    error = errors.Busy("wait", hint="soon", table="t")
    assert error.details == {"table": "t", "hint": "soon", "retryable": True}
    assert str(error) == error.message == "wait"


def test_error_without_a_hint_uses_the_hint_of_its_class_if_any() -> None:
    assert errors.Busy("wait").hint == errors.Busy.default_hint
    assert errors.NotFound("nothing").details == {}


def test_expired_offset_error_contains_the_earliest_offset() -> None:
    error = OffsetExpired(after=3, horizon=9, latest=20)
    assert (error.after, error.horizon, error.latest) == (3, 9, 20)
    assert error.message == "changes after offset 3 are gone; the log starts at 9"
    assert error.details["earliest_offset"] == 9
    assert error.details["latest_offset"] == 20


def test_long_message_and_hint_are_shortened() -> None:
    error = HeadwaterError("x" * 5_000_000, hint="y" * 5_000_000)
    assert len(error.message) == len(error.hint) == errors.MAX_TEXT + 1
    assert HeadwaterError("x" * errors.MAX_TEXT).message == "x" * errors.MAX_TEXT


def test_long_text_in_details_is_shortened_unless_it_is_a_url() -> None:
    error = errors.NotFound("none", database="x" * 5_000_000, pull_url="/" * 5_000, offset=3)
    assert error.details == {"database": "x" * errors.MAX_TEXT + "…", "pull_url": "/" * 5_000, "offset": 3}
