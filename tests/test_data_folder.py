"""Whose folder, whose log: nobody's history is ended by a second server or by another file of the same name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.app import App
from headwater.config import load
from headwater.errors import SourceMismatch, SourceUnfit


@contextlib.contextmanager
def app(data: Path, url: str = "") -> Iterator[App]:
    flags = {"data": str(data), "databases": {"main": url} if url else None}
    one = App(load(file=None, environ={}, flags=flags))
    one.start()
    try:
        yield one
    finally:
        one.close()


def write(one: App) -> tuple[str, int]:
    """Some history; its generation and newest offset."""
    database = one.database("main")
    database.source.write(lambda s: s.execute("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY)")).result(10)
    database.source.write(lambda s: s.execute("INSERT INTO t DEFAULT VALUES")).result(10)
    assert database.capture.catch_up(10)
    return database.log.generation, database.log.latest


def test_a_second_server_on_the_same_data_folder_is_refused(tmp_path: Path) -> None:
    with app(tmp_path / "data") as one:
        history = write(one)
        with pytest.raises(SourceMismatch, match="data folder"), app(tmp_path / "data", str(tmp_path / "b.db")):
            pass
        assert write(one) == (history[0], history[1] + 1)
    assert not list(tmp_path.rglob("*-headwater")), "locks leave nothing behind"


def test_a_log_is_not_taken_over_by_another_file(tmp_path: Path) -> None:
    with app(tmp_path / "data") as one:
        history = write(one)
    with (
        pytest.raises(SourceMismatch, match="the log of 'main' is of") as refused,
        app(tmp_path / "data", str(tmp_path / "other.db")),
    ):
        pass
    assert "NAME=" in refused.value.hint
    with app(tmp_path / "data") as one:
        assert (one.database("main").log.generation, one.database("main").log.latest) == history


def test_a_file_that_was_moved_keeps_its_log(tmp_path: Path) -> None:
    with app(tmp_path / "data", str(tmp_path / "a.db")) as one:
        history = write(one)
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / f"a.db{suffix}").rename(tmp_path / f"b.db{suffix}")
    with app(tmp_path / "data", str(tmp_path / "b.db")) as one:
        assert (one.database("main").log.generation, one.database("main").log.latest) == history


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnfit, match="nowhere"), app(tmp_path / "data", str(tmp_path / "nowhere" / "x.db")):
        pass
