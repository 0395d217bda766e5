"""The messages of the .proto files: one class for each, in all threads."""

import subprocess
import sys
from typing import Any

import pytest

from headwater.serve.grpc.messages import LARGE, MAX_FIELDS, check_fields, message

RACE = """
import sys, threading
from headwater.serve.grpc import messages

sys.setswitchinterval(1e-6)
names = ["Timestamp", "KeySpan", "Value", "Checkpoint", "ChangeFeedEvent", "ChangeFeedResponse", "Range", "CDCError"]
start, found = threading.Barrier(16), []

def ask():
    start.wait()
    found.append([messages.message(f"headwater.v1.{name}") for name in names])

threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len({id(messages.pool())}) == 1
for kinds in zip(*found):
    assert len(set(kinds)) == 1, kinds
"""


def test_message_has_one_class_for_all_threads() -> None:
    """Two classes of one message cannot be combined: a feed written by two threads failed."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def put_of(count: int, value: bytes = b"") -> Any:
    made = message("sochdb.v1.KvBatchPutRequest")(namespace="main")
    for number in range(count):
        made.entries.add(key=b"%d" % number, value=value, ttl_seconds=2**63)
    return made


@pytest.mark.parametrize("made", [put_of(MAX_FIELDS - 1), put_of(3, bytes(LARGE)), put_of(0)])
def test_message_within_the_limit_of_fields_is_accepted(made: Any) -> None:
    check_fields(made.SerializeToString())


def test_fields_of_every_kind_are_counted() -> None:
    kinds = b"\x08\x80\x01" + b"\x11" + bytes(8) + b"\x1a\x01x" + b"\x23\x24" + b"\x2d" + bytes(4)  # 6 tags
    times = MAX_FIELDS // 6
    check_fields(kinds * times)
    with pytest.raises(ValueError, match="more than"):
        check_fields(kinds * (times + 1))


@pytest.mark.parametrize("end", [b"\x0f", b"\x08", b"\x80" * 11])
def test_large_message_that_cannot_be_walked_is_refused(end: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        check_fields(b"\x08\x01" * (LARGE // 2) + end)
