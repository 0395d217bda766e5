"""Messages spilled until their commit are read back unchanged, wherever the edges of a read fall."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.app import App
from headwater.config import Config, DatabaseConfig
from headwater.errors import ConfigError, StorageFull
from headwater.sources.postgres.capture.stream import transaction_spill as spill
from headwater.sources.postgres.capture.stream.transaction_spill import FileSpill


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50), st.sampled_from([1, 1 << 20]))
def test_messages_of_any_size_are_read_back_from_the_spill(sizes: list[int], chunk: int, in_memory: int) -> None:
    messages = [bytes([place]) * size for place, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "CHUNK", chunk)
        kept = FileSpill(in_memory=in_memory)
        for message in messages:
            kept.append(message)
        assert list(kept.read()) == messages
        assert list(kept.read()) == messages  # and again
        assert kept.bytes == sum(sizes) + 4 * len(sizes)
        kept.drop()


def test_spilled_message_of_many_chunks_is_read_whole() -> None:
    kept = FileSpill()
    large = b"x" * (5 * spill.CHUNK)
    for message in (b"a", large, b"b"):
        kept.append(message)
    assert list(kept.read()) == [b"a", large, b"b"]
    kept.drop()


def test_error_of_an_unwritable_spill_does_not_show_its_path(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    spill = FileSpill(gone, in_memory=10)
    with pytest.raises(StorageFull) as caught:
        spill.append(b"x" * 100)
    assert "cannot be stored" in caught.value.message and str(gone) not in caught.value.message
    spill.drop()


def test_large_transaction_is_spilled_into_the_folder_of_the_source(pg: Server, tmp_path: Path) -> None:
    own = PgRig(pg, f"spilled_{os.getpid()}", "CREATE TABLE t(k int PRIMARY KEY, v text)", folder=tmp_path)
    try:
        with pg.connect(own.name) as other, other.transaction():
            other.execute("INSERT INTO t SELECT n, repeat('x', 500) FROM generate_series(1, 20000) n")
            end = time.monotonic() + PATIENCE
            while not any(path.startswith(str(tmp_path)) for path in open_files()):
                assert time.monotonic() < end, open_files()
                own.source.wait(0.02)
        assert sum(len(part.changes) for part in own.pull()) == 20_000
        own.kill_stream()
        assert list(tmp_path.iterdir()) == []
    finally:
        own.close()


def open_files() -> list[str]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(each.readlink()))
    return found


def test_source_receives_the_data_folder_of_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def made(*_: Any, **settings: Any) -> None:
        told.update(settings)
        raise ConfigError("seen")

    monkeypatch.setattr("headwater.sources.postgres.source.PostgresSource", made)
    config = Config(data=tmp_path, databases=(DatabaseConfig("main", url="postgresql://nobody@localhost/none"),))
    with pytest.raises(ConfigError, match="seen"):
        App(config).start()
    assert told["folder"] == tmp_path
