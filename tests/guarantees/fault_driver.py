"""The driver of every nemesis: a seeded schedule of faults over a system that must make progress between two faults.

`random.Random(seed)` decides all random choices; the interleaving of threads and processes is not reproducible.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from random import Random

from tests.guarantees.server_process import ServerProcess
from tests.suite.deadlines import wait_until


class ServerFaults:
    """The faults of our server, over any database. An event `a b` is the method `do_a_b`."""

    server: ServerProcess
    random: Random

    def happen(self, event: str) -> None:
        """Cause one event."""
        getattr(self, "do_" + event.replace(" ", "_"))()

    def do_calm(self) -> None:
        """Cause no fault for a second."""
        time.sleep(1)

    def do_kill(self) -> None:
        """Kill the server with SIGKILL and start it again."""
        self.server.kill()
        self.server.start()

    def do_kill_twice(self) -> None:
        """Kill the server, and once more while it starts."""
        self.server.kill()
        self.server.launch()
        time.sleep(self.random.random())  # a random point of the start
        self.do_kill()

    def do_end(self) -> None:
        """End the server with SIGTERM and start it again."""
        self.server.stop()
        self.server.start()

    def do_pause(self) -> None:
        """Stop the process of the server for a while, and let it continue."""
        self.server.signal(signal.SIGSTOP)
        time.sleep(0.6)
        self.server.signal(signal.SIGCONT)


class FaultDriver:
    """One run of one seed: `_run` starts the load, calls `drive` and checks the result; `close` stops everything."""

    quota = (8, 16)  # units of work between two events, at least and at most
    patience = 5.0  # seconds for more than the least of them

    def __init__(self, seed: str, dice: Random) -> None:
        self.seed, self.random = seed, dice
        self.events: list[str] = []  # those that happened, in their order

    def run(self) -> None:
        """Run load, faults and checks; raise AssertionError with the seed and the events if any fails."""
        failed = True
        try:
            self._run()
            failed = False
        except BaseException as error:
            raise AssertionError(
                f"seed {self.seed!r} failed\nevents: {', '.join(self.events)}\n{error}\n{self.last_words()}"
            ) from error
        finally:
            self.close(keep=failed)

    def drive(self, schedule: Iterable[str]) -> None:
        """Cause every event of `schedule`; work is done before, between and after them, or the run fails."""
        self._work()
        for event in schedule:
            self.events.append(event)
            self.happen(event)
            self.check()
            self._work()

    def _work(self) -> None:
        before = self.done
        self.let_work()
        assert self.done > before, f"nothing happened after {self.events[-1] if self.events else 'the start'}"

    def let_work(self) -> None:
        """Wait for a random amount of work within the quota; after `patience` seconds the minimum is enough."""
        time.sleep(self.random.random())
        least, most = self.quota
        before, wanted = self.done, self.random.randint(least, most)
        end = time.monotonic() + self.patience
        while self.done < before + wanted and time.monotonic() < end:
            time.sleep(0.01)
        wait_until(lambda: self.done >= before + least, "enough acknowledged writes")

    # --- what each nemesis says ------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Return how much work is done so far: acknowledged writes, or reports of progress."""
        raise NotImplementedError

    def happen(self, event: str) -> None:
        """Cause one event."""
        raise NotImplementedError

    def check(self) -> None:
        """Check what can be checked after each event."""

    def last_words(self) -> str:
        """Return the end of the logs that explain a failure."""
        raise NotImplementedError

    def close(self, *, keep: bool = False) -> None:
        """Stop everything; with `keep`, copy the files of a failed run."""
        raise NotImplementedError

    def _run(self) -> None:
        raise NotImplementedError
