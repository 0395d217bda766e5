"""How long tests wait for what must happen: a deadline, not a delay.

A wait ends as soon as its condition holds, so a long deadline costs nothing where all is well; a short one fails on
a machine that is busy with something else.
"""

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds: nothing takes this long unless it is broken
KEY_LIFETIME = 5  # seconds: long enough to open a stream with a key on a busy machine, short enough to wait for


def wait_until(holds: Callable[[], object], what: str = "the condition") -> None:
    """Ask again and again until `holds` is true; fail after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come true in {PATIENCE:.0f} s"
        time.sleep(0.005)
