"""Whose folder, whose log: nobody's history is ended by a second server or by another file of the same name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.suite.deadlines import PATIENCE

from headwater.app import App
from headwater.errors import SourceMismatch, SourceUnfit
from headwater.settings import load


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
    """Write some history; return the generation and the newest offset."""
    database = one.database("main")
    database.source.write(lambda s: s.execute("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY)")).result(PATIENCE)
    database.source.write(lambda s: s.execute("INSERT INTO t DEFAULT VALUES")).result(PATIENCE)
    assert database.capture.catch_up(10)
    return database.log.generation, database.log.latest


def test_second_server_on_the_same_data_folder_is_refused(tmp_path: Path) -> None:
    with app(tmp_path / "data") as one:
        history = write(one)
        with pytest.raises(SourceMismatch, match="data folder"), app(tmp_path / "data", str(tmp_path / "b.db")):
            pass
        assert write(one) == (history[0], history[1] + 1)
    assert not list(tmp_path.rglob("*-headwater")), "locks leave nothing behind"


def test_log_of_another_database_file_is_refused_and_kept(tmp_path: Path) -> None:
    with app(tmp_path / "data") as one:
        history = write(one)
    with (
        pytest.raises(SourceMismatch, match="the log of 'main' belongs to") as refused,
        app(tmp_path / "data", str(tmp_path / "other.db")),
    ):
        pass
    assert "NAME=" in refused.value.hint
    with app(tmp_path / "data") as one:
        assert (one.database("main").log.generation, one.database("main").log.latest) == history


def test_moved_database_file_keeps_its_log(tmp_path: Path) -> None:
    with app(tmp_path / "data", str(tmp_path / "a.db")) as one:
        history = write(one)
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / f"a.db{suffix}").rename(tmp_path / f"b.db{suffix}")
    with app(tmp_path / "data", str(tmp_path / "b.db")) as one:
        assert (one.database("main").log.generation, one.database("main").log.latest) == history


def test_file_in_a_missing_folder_is_refused_with_the_folder_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnfit, match="nowhere"), app(tmp_path / "data", str(tmp_path / "nowhere" / "x.db")):
        pass


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.rglob("*"))}


def test_new_data_folder_and_its_files_are_private(tmp_path: Path) -> None:
    data = tmp_path / "parent" / "data"
    with app(data) as one:
        write(one)
        one.create("second")
        write(one)
        found = modes(data)
        assert found.pop("data") == "0o700"
        assert set(found.values()) == {"0o600"}, found
        assert {"main.db", "main.log.db", "second.db", "queries.db"} <= found.keys()


def test_data_folder_of_older_version_is_made_private(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with app(data) as one:
        write(one)
    data.chmod(0o755)
    for path in data.iterdir():
        path.chmod(0o644)
    with app(data):
        assert set(modes(data).values()) == {"0o700", "0o600"}


def test_existing_foreign_folder_keeps_its_mode_and_a_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "shared"
    data.mkdir()
    data.chmod(0o755)
    (data / "notes.txt").write_text("mine")
    with app(data):
        assert "chmod 700" in caplog.text
        found = modes(data)
        assert (found["shared"], found["notes.txt"], found["main.db"]) == ("0o755", "0o644", "0o600")
