"""API keys: shown once, kept as a hash, revoked for good, and whole on disk whatever happens."""

import os
from pathlib import Path

import pytest

from headwater.errors import ConfigError, NotFound, StorageFull
from headwater.model.principal import Scope
from headwater.serve.auth.api_keys import Keys


def test_key_is_valid_after_a_restart(tmp_path: Path) -> None:
    text, made = Keys(tmp_path).create("ann", "editor", (Scope("shop"),), 5, now_ms=3)
    assert made.created_ms == 3
    found = Keys(tmp_path).find(text.encode())
    assert found == made
    who = found.principal()
    assert (who.name, who.role, who.scopes, who.until, who.credential) == (
        "ann",
        "editor",
        (Scope("shop"),),
        5,
        made.id,
    )


def test_secret_is_not_on_disk(tmp_path: Path) -> None:
    text, _ = Keys(tmp_path).create("ann", "viewer")
    secret = text.split("_", 2)[2].encode()
    for path in tmp_path.iterdir():
        assert secret not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0, path


def test_api_key_is_not_found_with_a_missing_or_different_pepper(tmp_path: Path) -> None:
    text, _ = Keys(tmp_path).create("ann", "viewer")
    (tmp_path / "pepper").unlink()
    assert Keys(tmp_path).find(text.encode()) is None
    given = Keys(tmp_path / "other", b"p" * 32)
    (tmp_path / "other").mkdir()
    text, _ = given.create("bob", "viewer")
    assert not (tmp_path / "other" / "pepper").exists()
    assert Keys(tmp_path / "other", b"p" * 32).find(text.encode())
    assert Keys(tmp_path / "other", b"q" * 32).find(text.encode()) is None


def test_revoked_api_key_is_not_found_even_after_reload_and_others_still_are(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    text, made = keys.create("ann", "viewer")
    other, _ = keys.create("bob", "viewer")
    keys.revoke(made.id)
    for each in (keys, Keys(tmp_path)):
        assert each.find(text.encode()) is None and not each.has(made.id)
        assert each.find(other.encode()) is not None
    with pytest.raises(NotFound):
        keys.revoke(made.id)


@pytest.mark.parametrize(
    "spoil", [lambda t: t[:-1], lambda t: t + "A", lambda t: t[:-1] + ("A" if t[-1] != "A" else "B")]
)
def test_altered_or_garbage_api_key_text_is_not_found(tmp_path: Path, spoil: object) -> None:
    keys = Keys(tmp_path)
    text, made = keys.create("ann", "viewer")
    assert keys.find(spoil(text).encode()) is None  # type: ignore[operator]
    assert keys.find(text.replace(made.id, "a" * 12).encode()) is None
    for junk in (b"", b"hw_", b"\xff" * 60, text.upper().encode()):
        assert keys.find(junk) is None


def test_key_revoked_on_a_full_disk_ends_at_once_and_is_written_by_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path)
    text, made = keys.create("ann", "viewer")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(StorageFull, match="No space") as raised:
            patch.setattr(os, "fsync", full)
            keys.revoke(made.id)
        assert "until the next start" in raised.value.hint
        assert keys.find(text.encode()) is None and not keys.has(made.id) and not keys.all()
    assert Keys(tmp_path).has(made.id)
    assert keys.revoke(made.id) == made
    assert not Keys(tmp_path).has(made.id)
    with pytest.raises(NotFound):
        keys.revoke(made.id)


def test_failed_fsync_while_creating_an_api_key_keeps_the_old_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path)
    text, _ = keys.create("ann", "viewer")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StorageFull, match="No space"):
        patch.setattr(os, "fsync", full)
        keys.create("bob", "viewer")
    assert [key.name for key in keys.all()] == ["ann"] == [key.name for key in Keys(tmp_path).all()]
    assert Keys(tmp_path).find(text.encode())


def test_damaged_file_is_reported_at_start(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("[{")
    with pytest.raises(ConfigError, match="damaged"):
        Keys(tmp_path)
