"""A table into Delta by `headwater pipeline run --once`: rows/s and memory, against plain PySpark and pandas.

python -m bench.lake [ROWS [CHANGES]]      the baselines run as `python -m bench.lake jdbc|pandas …`, one process each
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.sides import folder, versions
from bench.spark_log import BATCH, EVERYTHING, ROWS, commit, durable, engines, preload, served
from headwater.pipeline.spark.jars import DELTA, have_jars, jar_settings
from headwater.pipeline.spark.session import close_session, open_session

ROWS_DEFAULT, CHANGES_DEFAULT = 5_000_000, 200_000
SAMPLE_SECONDS = 0.2
CHUNK = 100_000  # rows that pandas reads at a time
DRIVER = "1g"  # of Spark's memory, on every side
SQLITE_JDBC = "org.xerial:sqlite-jdbc:3.50.3.0"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
KINDS = "id BIGINT, customer BIGINT, status STRING, total DOUBLE, currency STRING, placed_at STRING, note STRING,"
KINDS += " items BIGINT, paid BIGINT"

# parallelism and range_bytes are as they are by default
PIPELINE = """
[pipeline]
name = "bench"
server = "{url}"
master = "local[2]"
step_rows = {step}

[pipeline.conf]
"spark.driver.memory" = "{memory}"

[[table]]
table = "orders"

[table.sink]
kind = "delta"
path = "lake/{{table}}"
"""


# Memory


class Memory:
    """Peaks of resident memory of a tree of processes, by their kind, in MiB; sampled while the block runs.

    Pages that forked workers share are counted for each, so the sum is rather too large.
    """

    def __init__(self, driver: int, server: int | None = None) -> None:
        self._driver, self._server = driver, server
        self.peaks: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def __str__(self) -> str:
        return " · ".join(f"{name} {peak:,.0f}" for name, peak in self.peaks.items())

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            found = self._sample()
            for name, size in {"together": sum(found.values()), **found}.items():
                self.peaks[name] = max(self.peaks.get(name, 0.0), size)

    def _sample(self) -> dict[str, float]:
        sizes: dict[str, float] = {}
        children = _children()
        for root, first, rest in ((self._driver, "driver", "Python workers"), (self._server, "server", "bulk worker")):
            for pid in _tree(root, children) if root else ():
                name = first if pid == root else "JVM" if _name(pid) == "java" else rest
                sizes[name] = sizes.get(name, 0.0) + _resident(pid)
        return sizes


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name before the last bracket may hold blanks.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found.setdefault(parent, []).append(int(path.parent.name))
    return found


def _tree(root: int, children: dict[int, list[int]]) -> Iterator[int]:
    yield root
    for child in children.get(root, ()):
        yield from _tree(child, children)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
    except OSError:
        return 0.0


# Our side


@dataclass(frozen=True)
class Told:
    """One run of our command line: its lines of JSON, its time and its memory."""

    wall: float
    memory: Memory
    lines: list[dict[str, Any]] = field(repr=False)

    def all(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] == what]

    def between(self, first: str, *last: str) -> float:
        """Return the seconds from the first line of kind `first` to the last line of the kinds `last`."""
        ends = [line["ts_ms"] for what in last for line in self.all(what)]
        return float(max(ends) - self.all(first)[0]["ts_ms"]) / 1000


def pipeline(place: Path, server_pid: int, verb: str, *options: str) -> Told:
    """Run `headwater pipeline VERB lake.toml …` as a process to its end; return its lines, time and memory."""
    command = [sys.executable, "-m", "headwater", "pipeline", verb, str(place / "lake.toml"), *options, "-o", "json"]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with child, Memory(child.pid, server_pid) as memory:
        out = child.communicate()[0]
    if child.returncode:
        raise RuntimeError(f"pipeline {verb} failed: {out[-2000:]}")
    return Told(time.perf_counter() - started, memory, [json.loads(line) for line in out.splitlines()])


def snapshot(place: Path, server_pid: int) -> Told:
    """Run the pipeline for the first time and print its figures."""
    told = pipeline(place, server_pid, "run", "--once")
    rows = sum(line["rows"] for line in told.all("loaded"))
    seconds = told.between("started", "loaded", "stepped")
    ranges = told.all("started")[0]["ranges"]
    tell(f"headwater pipeline, {ranges} ranges", rows, seconds, told.wall, told.memory)
    return told


def step(place: Path, path: Path, url: str, server_pid: int, rows: int, changes: int) -> None:
    """Commit changes all over the table, run the pipeline once more and print its figures."""
    commit(path, scattered(rows, changes))
    durable(url)
    told = pipeline(place, server_pid, "run", "--once")
    steps = told.all("stepped")
    seconds = sum(line["seconds"] for line in steps)
    tell(f"changes in {len(steps)} step(s), merged", changes, seconds, told.wall, told.memory)


def scattered(rows: int, changes: int) -> list[str]:
    """Return statements all over the keys: a tenth deletes, six tenths updates, the rest inserts."""
    tenth = max(changes // 10, 1)
    old = 7 * tenth
    stride, batch = max(rows // old, 1), min(BATCH, tenth)
    found = []
    for start in range(0, old, batch):
        low, high = start * stride, min(start + batch, old) * stride
        act = "UPDATE orders SET status = 'back', total = total + 1" if start >= tenth else "DELETE FROM orders"
        found.append(f"{act} WHERE id > {low} AND id <= {high} AND id % {stride} = 0")
    new = changes - old
    return found + [ROWS % (rows + start, min(batch, new - start + 1)) for start in range(1, new + 1, batch)]


def verification(place: Path, server_pid: int) -> None:
    """Compare source and sink with `pipeline verify`; raise RuntimeError if they differ."""
    told = pipeline(place, server_pid, "verify")
    (found,) = told.all("verified")
    if not found["equal"]:
        raise RuntimeError(f"source and sink differ: {found}")
    tell("headwater pipeline verify, Spark's start too", found["rows"], told.wall, told.wall, told.memory)


# Their side


def by_jdbc(file: str, target: str, parts: int, jar: str) -> dict[str, Any]:
    """Copy the SQLite file by plain PySpark and JDBC, partitioned by its key, into Delta, or Parquet without Delta's
    jars.
    """
    from pyspark.sql.functions import col

    kinds = [DELTA] if have_jars(DELTA) else []
    jars = [jar_settings(kinds).get("spark.jars", ""), jar]
    conf = {"spark.jars": ",".join(filter(None, jars)), "spark.driver.memory": DRIVER}
    began = time.perf_counter()
    spark = open_session("local[2]", "bench", jars=kinds, conf=conf)
    started = time.perf_counter()
    (low, high) = _bounds(file)
    told: dict[str, Any] = {
        "url": f"jdbc:sqlite:{file}",
        "dbtable": "orders",
        "driver": "org.sqlite.JDBC",
        "customSchema": KINDS,
    }
    told |= {"partitionColumn": "id", "lowerBound": low, "upperBound": high, "numPartitions": parts}
    read = spark.read.format("jdbc").options(**told).load()
    # The driver calls a text a varchar of length 0, and Delta would hold rows to that.
    frame = read.select(*(col(name).alias(name, metadata={}) for name in read.columns))
    form = "delta" if kinds else "parquet"
    frame.write.format(form).save(target)
    ended = time.perf_counter()
    rows = spark.read.format(form).load(target).count()
    close_session(spark)
    return {"seconds": ended - started, "start": started - began, "rows": rows, "form": form}


def _bounds(file: str) -> tuple[int, int]:
    db = sqlite3.connect(file)
    found: tuple[int, int] = db.execute("SELECT min(id), max(id) FROM orders").fetchone()
    db.close()
    return found


def by_pandas(file: str, target: str) -> dict[str, Any]:
    """Copy the SQLite file in chunks of pandas, appended by delta-rs."""
    import pandas
    import pyarrow
    from deltalake import DeltaTable, write_deltalake

    started = time.perf_counter()
    db = sqlite3.connect(file)
    for chunk in pandas.read_sql(EVERYTHING, db, chunksize=CHUNK):
        write_deltalake(target, pyarrow.Table.from_pandas(chunk, preserve_index=False), mode="append")
    db.close()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "start": 0.0, "rows": DeltaTable(target).count(), "form": "delta"}


def baseline(name: str, label: str, path: Path, target: Path, *more: str) -> float:
    """Run one of the baselines in its own process; return its seconds without its start."""
    command = [sys.executable, "-m", "bench.lake", name, str(path), str(target), *more]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, Memory(child.pid) as memory:
        out = child.communicate()[0]
    if child.returncode:
        raise RuntimeError(f"{label} failed; the reason is above")
    found = json.loads(out.splitlines()[-1])
    tell(f"{label}, to {found['form']}", found["rows"], found["seconds"], time.perf_counter() - started, memory)
    return float(found["seconds"])


def sqlite_jdbc(place: Path) -> Path | None:
    """Return SQLite's JDBC driver, fetched by Maven; None if Maven is missing or cannot fetch it."""
    mvn = shutil.which("mvn")
    if mvn is None:
        return None
    where = place / "jdbc"
    command = [mvn, "-q", "-B", COPY, f"-Dartifact={SQLITE_JDBC}", f"-DoutputDirectory={where}"]
    done = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    return None if done.returncode else next(where.glob("*.jar"), None)


# All of it


def tell(label: str, rows: int, seconds: float, wall: float, memory: Memory) -> None:
    """Print one line of figures and one of memory."""
    print(f"  {label:44} {rows:>9,} rows {seconds:>7.1f} s   {rows / seconds:>9,.0f} rows/s   (process {wall:.1f} s)")
    print(f"      MiB at most: {memory}", flush=True)


def main(rows: int = ROWS_DEFAULT, changes: int = CHANGES_DEFAULT) -> None:
    """Print rates, memory and ratios."""
    print(versions())
    print(engines())
    print(f"lake: a snapshot of {rows:,} rows into Delta on local[2], then {changes:,} changes, then verify")
    print("  seconds: without the start of processes and sessions, which is in `process`", flush=True)
    with folder() as place:
        path = place / "orders.db"
        preload(path, rows)
        with served(place, path) as (url, pid):
            (place / "lake.toml").write_text(PIPELINE.format(url=url, step=max(changes, 1), memory=DRIVER))
            told = snapshot(place, pid)
            others = compared(place, path, told.all("started")[0]["ranges"])
            ours = told.between("started", "loaded", "stepped")
            for label, seconds in others.items():
                print(f"  ours against {label}: {seconds / ours:.2f}x its rate")
            step(place, path, url, pid, rows, changes)
            verification(place, pid)


def compared(place: Path, path: Path, ranges: int) -> dict[str, float]:
    """Return the seconds of each baseline."""
    found = {}
    jar = sqlite_jdbc(place)
    if jar is None:
        print(f"  without Spark JDBC: Maven does not give {SQLITE_JDBC}")
    else:
        more = (str(ranges), str(jar))
        found["Spark JDBC"] = baseline("jdbc", f"Spark JDBC, {ranges} partitions", path, place / "jdbc-lake", *more)
    found["pandas"] = baseline("pandas", f"pandas, chunks of {CHUNK:,}", path, place / "pandas-lake")
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["jdbc", file, target, parts, jar]:
            print(json.dumps(by_jdbc(file, target, int(parts), jar)))
        case ["pandas", file, target]:
            print(json.dumps(by_pandas(file, target)))
        case sizes:
            main(*map(int, sizes))
