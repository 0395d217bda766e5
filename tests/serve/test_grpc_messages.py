"""The messages of the .proto files: one class for each, whoever asks for it first."""

import subprocess
import sys

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


def test_a_message_has_one_class_whoever_asks_first() -> None:
    """Two of them do not fit into each other: a feed that was written by two threads failed."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
