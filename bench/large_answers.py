"""Large answers: latency of /healthz and memory of the server while the worst queries are answered."""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import threading
import time
from pathlib import Path

from bench.ours import RPC, Ours, ours
from bench.sides import folder, versions

BAR_MS = 100  # of /healthz
SERIES = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000)"
WORST = {
    "10 values of 60 MB": "SELECT " + ", ".join(["zeroblob(60000000)"] * 10),
    "one value of 40 MB": "SELECT randomblob(40000000)",
    "a text of 40 MB": "SELECT hex(zeroblob(20000000))",
    "a text of 30 MB that is not ASCII": "SELECT replace(hex(zeroblob(7500000)), '0', 'é')",
    "characters that JSON escapes": "SELECT replace(hex(zeroblob(4000000)), '0', char(1))",
    "6,000,000 small values": f"{SERIES} SELECT {', '.join(['x'] * 60)} FROM c",
    "100,000 rows of 600 characters": f"{SERIES} SELECT hex(randomblob(300)) FROM c",
    "480 MB on the way": "SELECT " + " + ".join(["length(randomblob(60000000))"] * 8),
}


class Health:
    """Requests /healthz repeatedly and samples the memory of the server."""

    def __init__(self, side: Ours) -> None:
        self._port, self._pid = side.port, side.pids[0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took: list[float] = []
        self.mib = 0

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        asking = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            began = time.perf_counter()
            asking.request("GET", "/healthz")
            asking.getresponse().read()
            self.took.append(1000 * (time.perf_counter() - began))
            status = Path(f"/proc/{self._pid}/status").read_text()
            self.mib = max(self.mib, int(status.split("VmRSS:")[1].split()[0]) >> 10)
            time.sleep(0.005)
        asking.close()

    def told(self) -> str:
        """Return the figures as text."""
        late = sorted(self.took)[int(0.99 * len(self.took))]
        middle = statistics.median(self.took)
        return f"/healthz {middle:.1f} ms, 99 % {late:.0f} ms, worst {max(self.took):.0f} ms · {self.mib:,} MiB"


def ask(side: Ours, sql: str) -> str:
    """Request one answer and read all of it; return its size, or its error code."""
    asking = http.client.HTTPConnection("127.0.0.1", side.port, timeout=120)
    asking.request("POST", RPC, body(sql), {"Content-Type": "application/json"})
    answer = asking.getresponse()
    first, size = answer.read(200), 200
    while piece := answer.read(1 << 20):
        size += len(piece)
    asking.close()
    return f"{size >> 20} MiB" if b'"ok":true' in first else first.split(b'"code":"')[1].split(b'"')[0].decode()


def body(sql: str) -> bytes:
    """Return a `sql.exec` request as JSON."""
    return json.dumps({"id": 1, "method": "sql.exec", "params": {"sql": sql}}).encode()


def main(times: float = 2) -> None:
    """Print the figures of each query alone, and of all of them at once."""
    print(versions())
    print(f"large answers: /healthz beside them (bar: {BAR_MS} ms), and the memory of the server")
    with folder() as place, ours(place / "data") as side:
        for name, sql in WORST.items():
            with Health(side) as health:
                came = ask(side, sql)
            print(f"  {name:34} {came:16} {health.told()}")
        with Health(side) as health:
            every = [sql for sql in WORST.values() for _ in range(int(times))]
            threads = [threading.Thread(target=ask, args=(side, sql)) for sql in every]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(f"  all of them, {int(times)} times at once {'':15} {health.told()}")


if __name__ == "__main__":
    main(*(float(each) for each in sys.argv[1:]))
