"""Memory of pulls whose client does not read: one batch each, and beyond a limit of all of them a file."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.capture.captured_database import Running, running
from tests.ranges.bulk_reads import Side, place_of, reading, rows_in
from tests.suite.deadlines import PATIENCE

from headwater.errors import StorageFull
from headwater.ranges.pull import log_slices
from headwater.ranges.pull.arrow_pieces import BodyPiece, snapshot_pieces, tables_pieces
from headwater.ranges.pull.jobs import END, HEAD, Job, LogJob, Selection, SnapshotJob, TablesJob, encode_job
from headwater.ranges.pull.log_slices import log_pieces
from headwater.ranges.pull.slice_cache import Cache, Slice
from headwater.ranges.worker import worker
from headwater.ranges.worker.worker import FRAME, Worker
from headwater.sources.sqlite.read.bulk_reader import SqliteReader

ROWS, WIDTH = 600, 100_000
HELD = 16 << 20  # a batch of about 4 MiB as Arrow, and at most two blocks of the log
WHOSE = ("app", "key:one")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("wide")) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v TEXT)")
        made.run(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) "
            f"INSERT INTO t SELECT i, printf('%.{WIDTH}d', i) FROM n"
        )
        made.run("UPDATE t SET v = v || '.' WHERE k % 10 = 0")
        yield made


@pytest.fixture
def side(one: Running, tmp_path: Path) -> Iterator[Side]:
    with reading(one, tmp_path / "cache") as made:
        yield made


def pieces_of(side: Side, kind: str) -> Iterator[BodyPiece]:
    upto, gone = side.durable(), lambda: False
    past = next(part.upto for part in side.log.scan(after=ROWS - 1))
    jobs: dict[str, Job] = {
        "rows": SnapshotJob(side.place, "t", upto),
        "filtered rows": SnapshotJob(side.place, "t", upto, Selection(where="k > 0")),
        "earlier rows": SnapshotJob(side.place, "t", past),
        "log": LogJob(side.place, "t", 0, upto, None, Selection(where="k > 0")),
        "cached log": LogJob(side.place, "t", 0, upto),
        "columns of the cached log": LogJob(side.place, "t", 0, upto, None, Selection(columns=("v",))),
        "several tables": TablesJob(side.place, (), 0, upto),
    }
    match jobs[kind]:
        case SnapshotJob() as job:
            return snapshot_pieces(side.reader, side.log, job, gone)
        case LogJob() as job:
            return log_pieces(side.reader, side.log, side.cache, job, gone)
        case job:
            return tables_pieces(side.reader, side.log, job, gone)


@pytest.mark.parametrize(
    "kind",
    [
        "rows",
        "filtered rows",
        "earlier rows",
        "log",
        "cached log",
        "columns of the cached log",
        "several tables",
    ],
)
def test_unread_pull_holds_about_one_batch(side: Side, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 512)
    monkeypatch.setattr(log_slices, "OPENING_BYTES", 1)
    for _ in pieces_of(side, kind):
        pass  # it fills the caches of the source, the log and the slices
    tracemalloc.start()
    try:
        arrow, held = pa.total_allocated_bytes(), 0
        for _ in pieces_of(side, kind):
            now, _ = tracemalloc.get_traced_memory()
            held = max(held, now + pa.total_allocated_bytes() - arrow)
    finally:
        tracemalloc.stop()
    assert held < HELD


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker without a job, with memory for one piece of two frames."""
    monkeypatch.setattr(worker, "UNREAD", 2 * FRAME)

    def never(*_: object) -> SqliteReader:
        raise AssertionError

    return Worker(never, Cache(tmp_path / "cache", 0))


def test_piece_beyond_the_memory_for_unread_pulls_waits_in_a_file(idle: Worker, tmp_path: Path) -> None:
    large = [BodyPiece(bytes([number]) * 2 * FRAME, number) for number in range(3)]
    pieces = iter([large[0], BodyPiece(b"small", 1), large[1], large[2]])
    assert idle._next(pieces, WHOSE) is large[0]
    small = idle._next(pieces, WHOSE)
    assert small is not None and small.data == b"small", "pieces of one frame are not counted"
    filed = idle._next(pieces, WHOSE)
    assert filed is not None and filed.rows == 1 and isinstance(filed.data, Slice)
    assert filed.data.read(0, filed.data.length) == large[1].data
    assert not list((tmp_path / "cache").iterdir()), "the file has no name, so that it ends with its reader"
    filed.data.close()
    idle._unread.release(2 * FRAME)
    assert idle._next(pieces, WHOSE) is large[2]
    assert idle._next(pieces, WHOSE) is None


def test_unread_pull_without_space_for_its_file_fails_with_storage_full(idle: Worker, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    pieces = iter([BodyPiece(b"x" * 3 * FRAME, 1)])
    with pytest.raises(StorageFull):
        idle._next(pieces, WHOSE)


def test_pull_sent_from_files_has_the_same_rows(one: Running, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "UNREAD", 0)
    upto = side.durable()
    ours, theirs = socket.socketpair()
    serving = Worker(
        lambda place, _: SqliteReader(place.source.address, inode=place.source.inode, generation=place.generation),
        side.cache,
    )
    thread = threading.Thread(target=serving._answer, args=(theirs,))
    thread.start()
    with ours, ours.makefile("rb") as answer:
        ours.sendall(encode_job(SnapshotJob(place_of(one), "t", upto)))
        body, kind = b"", None
        while kind != END:
            kind, _, length = HEAD.unpack(answer.read(HEAD.size))
            body += answer.read(length) if kind != END else b""
    thread.join(PATIENCE)
    assert rows_in(body) == side.snapshot(upto)
    assert serving._unread.used == 0
