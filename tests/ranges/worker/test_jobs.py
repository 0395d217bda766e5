"""Jobs and answers come through a socket as they were, errors included."""

import inspect

import msgspec
import pytest

from headwater import errors
from headwater.errors import HeadwaterError, NotFound, OffsetExpired, StaleEpoch
from headwater.model.keys.key import Span
from headwater.ranges.pull.jobs import (
    END,
    FAILURE,
    HEAD,
    JOB_HEAD,
    CacheCounters,
    DatabaseLocation,
    Failed,
    Job,
    LogJob,
    Selection,
    SnapshotJob,
    TablesJob,
    changes_gone,
    decode_job,
    encode_end,
    encode_job,
    error_in,
)
from headwater.sources.read import BulkAddress

PLACE = DatabaseLocation("main", BulkAddress("sqlite", "/a/b.db", 7), "/a/b.log.db", 8, "g1")


@pytest.mark.parametrize(
    "job",
    [
        SnapshotJob(PLACE, "näme", 5),
        SnapshotJob(PLACE, "t", 5, Selection(Span(b"\x00\xff", b"\x01"), ("a", "b"), "a > 1")),
        LogJob(PLACE, "t", 1, 2**62, 3, Selection(Span(b"a", None))),
        TablesJob(PLACE, (), 0, 1),
    ],
)
def test_bulk_job_round_trips_through_its_encoding(job: Job) -> None:
    data = encode_job(job)
    assert int.from_bytes(data[:JOB_HEAD], "big") == len(data) - JOB_HEAD
    assert decode_job(data[JOB_HEAD:]) == job


def test_job_with_a_table_name_that_is_not_utf8_raises_not_found() -> None:
    with pytest.raises(NotFound):
        encode_job(SnapshotJob(PLACE, "\udcff", 5))


def test_end_frame_has_the_cache_counters() -> None:
    data = encode_end(CacheCounters(3, 2, 10))
    kind, rows, length = HEAD.unpack(data[: HEAD.size])
    assert (kind, rows, length) == (END, 0, len(data) - HEAD.size)
    assert msgspec.msgpack.decode(data[HEAD.size :], type=CacheCounters) == CacheCounters(3, 2, 10)


def through(error: HeadwaterError) -> HeadwaterError:
    data = encode_end(error)
    assert HEAD.unpack(data[: HEAD.size])[0] == FAILURE
    return error_in(msgspec.msgpack.decode(data[HEAD.size :], type=Failed))


KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadwaterError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_decoded_as_it_was(kind: type[HeadwaterError]) -> None:
    error = kind(1, 2, 3) if kind is OffsetExpired else kind("no", hint="do this", ranges=[{"id": 1}])  # type: ignore
    found = through(error)
    assert type(found) is kind
    assert (found.message, found.hint, found.details, str(found)) == (
        error.message,
        error.hint,
        error.details,
        str(error),
    )


def test_stale_epoch_error_from_the_worker_keeps_its_ranges() -> None:
    assert through(StaleEpoch("split", ranges=[{"id": 4}])).extra == {"ranges": [{"id": 4}]}


def test_trimmed_offset_error_has_its_reason() -> None:
    found = through(changes_gone(3, 10, 20, "truncated", "table 't' was emptied"))
    assert (found.code, found.status, found.message) == ("resnapshot_required", 410, "table 't' was emptied")
    assert found.extra == {"earliest_offset": 10, "latest_offset": 20, "resnapshot_reason": "truncated"}
