"""The reserve of disk space: allocated on disk when taken, free when released, and no other file changed."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from headwater.log.disk.space_reserve import PLENTY, RESERVE_BYTES, SpaceReserve


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(SpaceReserve, "_free", size)


def test_reserve_taken_twice_is_allocated_once(tmp_path: Path) -> None:
    reserve = SpaceReserve(tmp_path)
    assert reserve.take() and reserve.take() and not reserve.is_storage_full
    found = (tmp_path / "reserve").stat()
    assert found.st_size == RESERVE_BYTES and RESERVE_BYTES <= 512 * found.st_blocks < 2 * RESERVE_BYTES
    assert found.st_mode & 0o777 == 0o600
    reserve.release()
    reserve.release()
    assert list(tmp_path.iterdir()) == []


def test_disk_without_plenty_of_space_gets_no_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = SpaceReserve(tmp_path)
    free(monkeypatch, PLENTY - 1)
    assert not reserve.take() and not reserve.is_storage_full
    assert list(tmp_path.iterdir()) == []


def test_reserve_is_partial_while_space_is_short_and_full_when_space_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = SpaceReserve(tmp_path)
    assert reserve.take()
    reserve.release()
    free(monkeypatch, 3 << 20)
    assert not reserve.take()
    assert (tmp_path / "reserve").stat().st_size == 3 << 20
    free(monkeypatch, PLENTY)
    assert reserve.take()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP, errno.EDQUOT])
def test_reserve_that_cannot_be_allocated_raises_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not SpaceReserve(tmp_path).take()


def test_removed_folder_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    reserve = SpaceReserve(tmp_path / "gone")
    assert not reserve.is_storage_full and not reserve.take()


def test_reserve_is_written_where_space_cannot_be_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    assert SpaceReserve(tmp_path).take()
    assert 512 * (tmp_path / "reserve").stat().st_blocks >= RESERVE_BYTES
