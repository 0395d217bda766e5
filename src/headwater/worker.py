"""The entry point of the bulk worker, `python -m headwater.worker`, which a server starts and which ends with it.

Standard input is a pipe that only the server holds: first a line of settings, then nothing until end of file, which
means that the server has ended, for any reason.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec

from headwater.log.disk.disk_log import DiskLog
from headwater.model.work.sqlite_memory import return_freed_memory
from headwater.ranges.pull.jobs import DatabaseLocation
from headwater.ranges.pull.slice_cache import Cache
from headwater.ranges.worker.position_requests import PositionClient
from headwater.ranges.worker.process import READY, Settings
from headwater.ranges.worker.worker import Worker
from headwater.sources import registry
from headwater.sources.read import BulkReader

NICE = 5  # on a busy machine commits and feeds have priority over pulls


class NoPandas:
    """An import hook that hides pandas: pyarrow imports it before its first array, which takes seconds and 100 MB."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for pandas, as if it were not installed."""
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not loaded here", name=name)


def open_reader(place: DatabaseLocation, log: DiskLog, positions: str) -> BulkReader:
    """Open a bulk reader of a database and its log; `positions` is the socket where the server answers."""
    server = PositionClient(positions, place.db, place.generation)
    kind = registry.kind(place.source.kind)
    return kind.open_bulk_reader(place.db, place.source, generation=place.generation, log=log, server=server)


def main() -> None:
    """Answer bulk reads until the server that started this process has ended."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    return_freed_memory()
    sys.meta_path.insert(0, NoPandas)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)  # a chunk is thousands of tuples, none of them part of a reference cycle
    os.umask(0o077)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(settings.socket)
    listener.listen(128)
    cache = Cache(Path(settings.cache), settings.cache_bytes)
    worker = Worker(partial(open_reader, positions=settings.positions), cache)
    threading.Thread(target=_end_with_server, args=(settings.socket,), daemon=True).start()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    worker.serve(listener)


def _end_with_server(path: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
