"""Framed pages of the log: the same frames whether changes are written one by one or many at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.feeds.feed_database import FILTERS, WITHOUT_SIZE, Fed, Writer, changes, frames_of, insert, line

from headwater.errors import InvalidRequest
from headwater.feeds.deliver.catch_up_page import SLACK, Piece, read_piece
from headwater.feeds.formats.debezium import Debezium
from headwater.feeds.formats.debezium_encoder import IS_BUILT
from headwater.feeds.groups.log_reader import SCAN, View
from headwater.feeds.options import Shape
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.transaction_parts import BLOCK_CHANGES
from headwater.model.change import Change, Op

BIG = 1 << 40
built = pytest.mark.skipif(not IS_BUILT, reason="there was no C compiler at the installation")


def debezium(fed: Fed, *, by: str = "compiled", **options: Any) -> View:
    view = fed.view(format="debezium_json", **options)
    if by == "python":
        view.encoder = Debezium(Shape("main", "debezium_json", before=view.options.before, after=True))
    return view


def read(fed: Fed, view: View, after: int, limit: int = 10**6, most: int = BIG) -> Piece:
    return read_piece(fed.log, view, line, after=after, upto=fed.log.latest, limit=limit, most=most)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["python", pytest.param("compiled", marks=built)])
@pytest.mark.parametrize("seed", range(12))
def test_pieces_contain_every_passing_change(seed: int, by: str) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    fed = Fed(part=30, keep_changes=64)
    Writer(fed, seed, keys=30, largest=40).write(60)
    if seed % 2:
        fed.log.flush()
    ends = {part.upto: part.ts for part in fed.log.scan(after=0) if part.last}
    for options in FILTERS:
        view = debezium(fed, by=by, **{name: value for name, value in options.items() if name != "columns"})
        at, found = 0, b""
        while at < fed.log.latest:
            limit, most = chance.choice([1, 7, 500]), chance.choice([1, 3000, BIG])
            piece = read(fed, view, at, limit, most)
            frames = frames_of(piece.data)
            assert piece.changes == len(frames) <= limit and piece.upto > at
            assert not frames or piece.last == int(frames[-1].id) <= piece.upto
            assert piece.ts == ends.get(piece.upto, 0)
            assert sum(len(frame.body) for frame in frames[:-1]) < SLACK * most
            at, found = piece.upto, found + piece.data
        assert changes(frames_of(found)) == fed.expected(view)


@pytest.mark.parametrize("by", ["python", pytest.param("compiled", marks=built)])
def test_selective_filter_advances_by_the_scan_limit(by: str) -> None:
    fed = Fed()
    for start in range(0, 2 * SCAN, 1024):
        fed.commit(*(insert(id) for id in range(start, start + 1024)))
    piece = read(fed, debezium(fed, by=by, tables=("items",), where="size = 99"), 0)
    assert (piece.data, piece.changes) == (b"", 0) and SCAN <= piece.upto <= SCAN + 1024


@pytest.mark.parametrize("by", ["python", pytest.param("compiled", marks=built)])
def test_changes_before_the_drop_of_a_filter_column_are_delivered_before_the_error(by: str) -> None:
    fed = Fed()
    for id in range(5):
        fed.commit(insert(id, size=9))
    fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
    fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (7, "")))
    view = debezium(fed, by=by, tables=("items",), where="size > 2", ops=("insert", "delete"))
    piece = read(fed, view, 0)
    assert piece.changes == 5 and 5 <= piece.upto < 7
    with pytest.raises(InvalidRequest, match="does not fit"):
        read(fed, view, piece.upto)


@built
def test_piece_ends_at_a_block_boundary_if_possible(tmp_path: Path) -> None:
    fed = Fed()
    disk = DiskLog.open(tmp_path / "main.log.db")
    for start in range(0, 4 * BLOCK_CHANGES, BLOCK_CHANGES):
        fed.commit(*(insert(id) for id in range(start, start + BLOCK_CHANGES)))
    disk.append(fed.log.scan(after=0))
    fed.log = LiveLog(disk, keep_changes=0)
    view = debezium(fed, tables=("items",))
    size = len(read(fed, view, 0, limit=BLOCK_CHANGES).data)
    assert read(fed, view, 0, most=size - 1000).upto == BLOCK_CHANGES
    assert read(fed, view, 100, most=size // 2).upto == BLOCK_CHANGES
    assert read(fed, view, 0, most=size + 5000).upto == 2 * BLOCK_CHANGES
    assert read(fed, view, 0, most=size // 10).upto < BLOCK_CHANGES // 4
    disk.close()
