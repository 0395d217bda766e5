"""gRPC streams: server CPU per delivered event, against a bare grpc.aio server that sends ready bytes.

Single: one event at a time, the next when all streams have it. Pipelined: 64 at a time (for us one commit of 64 rows).
What publishing costs at the same pace with nobody listening is taken out of ours: a publisher who hurries has several
of its commits logged at once. Once more with an API key.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.ours import Ours
from bench.sides import announced, cpu_seconds, folder, versions
from headwater.serve.grpc.messages import message

STREAMS = (1, 100)
WIDTHS = {1: "single", 64: "pipelined"}
PATH = "/sochdb.v1.SubscriptionService/Subscribe"
TABLE = "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer INTEGER, note TEXT)"
ASKED = message("sochdb.v1.SubscribeRequest")(namespace="main", tables=["orders"]).SerializeToString()
SIZE = 160  # bytes of one event of ours, about


class Child:
    """A child process that answers each number on its stdin by a word."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "bench.grpc_child", *args]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        self._in, self._out = self.process.stdin, self.process.stdout
        self.said = self._out.readline().strip()
        if not self.said:
            raise RuntimeError(f"{command} ended")

    def tell(self, number: int) -> None:
        self._in.write(f"{number}\n")
        self._in.flush()

    def wait(self) -> None:
        if self._out.readline().strip() != "done":
            raise RuntimeError("the reader ended")

    def close(self) -> None:
        self._in.close()
        self.process.kill()
        self.process.wait()
        self._out.close()


class Cost(NamedTuple):
    """The figures of one run."""

    server_us: float  # per delivery
    rate: float  # deliveries a second
    pace: float  # seconds from one round to the next


def run(pid: int, publish: Callable[[int], object], reader: Child, streams: int, width: int, seconds: float) -> Cost:
    """Publish for `seconds`, each time after all streams have the last messages; return the cost."""
    rounds, before, began = 0, cpu_seconds(pid), time.perf_counter()
    while time.perf_counter() - began < seconds:
        reader.tell(width)
        publish(width)
        reader.wait()
        rounds += 1
    took, deliveries = time.perf_counter() - began, rounds * width * streams
    return Cost((cpu_seconds(pid) - before) / deliveries * 1e6, deliveries / took, took / rounds)


def alone(pid: int, publish: Callable[[int], object], width: int, pace: float, seconds: float) -> float:
    """Return the microseconds of server CPU for one round of publishing without readers."""
    rounds, before, began = 0, cpu_seconds(pid), time.perf_counter()
    while time.perf_counter() - began < seconds:
        publish(width)
        rounds += 1
        time.sleep(max(0.0, began + rounds * pace - time.perf_counter()))
    return (cpu_seconds(pid) - before) / rounds * 1e6


@contextlib.contextmanager
def closing(child: Child) -> Iterator[Child]:
    try:
        yield child
    finally:
        child.close()


def ours(url: str, pid: int, address: str, token: str, streams: int, width: int, seconds: float) -> Cost:
    """Measure our server, and subtract the cost of publishing."""
    side = Ours(url, pid, token)
    values = ", ".join(["(1, ?)"] * width)

    def publish(count: int) -> None:
        side.ask("sql.exec", sql=f"INSERT INTO orders(customer, note) VALUES {values}", args=["x" * 64] * count)

    with closing(Child("read", address, str(streams), PATH, ASKED.hex(), token)) as reader:
        found = run(pid, publish, reader, streams, width, seconds)
    idle = alone(pid, publish, width, found.pace, seconds)
    side.close()
    return found._replace(server_us=found.server_us - idle / (width * streams))


def floor(bare: Child, streams: int, width: int, seconds: float) -> Cost:
    """Measure the gRPC library alone."""
    with closing(Child("read", bare.said, str(streams), "/bare/Stream", "", "")) as reader:
        return run(bare.process.pid, bare.tell, reader, streams, width, seconds)


def measure(place: Path, repeats: int, seconds: float) -> None:
    """Print medians of interleaved runs."""
    token = "bench-token-of-no-use-elsewhere"
    settings = place / "locked.toml"
    settings.write_text(f'[serve]\ntoken = "{token}"\n')
    with (
        announced(place / "open") as (line, pid),
        announced(place / "locked", "--config", str(settings)) as (locked, locked_pid),
        closing(Child("serve", str(SIZE))) as bare,
    ):
        for each, credential in ((line, ""), (locked, token)):
            Ours(each[3], 0, credential).ask("sql.exec", sql=TABLE)
        key = Ours(locked[3], 0, token).ask("security.token.create", name="bench", role="editor")["token"]
        print("  streams, window: us of server CPU per event: ours, ours with a credential, bare grpc.aio; events/s")
        for streams in STREAMS:
            for width, name in WIDTHS.items():
                runs: list[list[Cost]] = [[], [], []]
                for _ in range(repeats):
                    runs[0].append(ours(line[3], pid, line[5], "", streams, width, seconds))
                    runs[1].append(ours(locked[3], locked_pid, locked[5], key, streams, width, seconds))
                    runs[2].append(floor(bare, streams, width, seconds))
                mine, held, least = (statistics.median(cost.server_us for cost in each) for each in runs)
                rate = statistics.median(cost.rate for cost in runs[0])
                print(
                    f"  {streams:>4} {name:9} {mine:>7.1f} {held:>7.1f} {least:>7.1f}   {rate:>9,.0f}/s"
                    f"   {mine / least:.2f}x of bare, {held / mine:.2f}x with a credential"
                )


def main(repeats: int = 3, seconds: float = 2.0) -> None:
    """Print costs and ratios."""
    print(versions())
    with folder() as place:
        measure(place, repeats, seconds)


if __name__ == "__main__":
    main()
