"""API keys, stored as peppered hashes in one file; the text of a key is shown once, when the key is created.

A key is `hw_<id>_<secret>`: lists and revocations name the id, the secret is 256 random bits, so one keyed hash is
enough. The file is replaced as a whole: after a crash it holds either the old keys or the new ones.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headwater.errors import ConfigError, LimitExceeded, NotFound, StorageFull
from headwater.model.principal import Principal, Scope

MOST = 10_000
_KEY = re.compile(rb"hw_([a-z0-9]{12})_([A-Za-z0-9_-]{43})\Z")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


class Key(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stored key: its hash and its rights, without the secret."""

    id: str
    name: str
    role: str
    hash: bytes
    created_ms: int
    scopes: tuple[Scope, ...] | None = None
    until_ms: int | None = None

    def principal(self) -> Principal:
        """Return the caller that this key authenticates."""
        return Principal(self.name, self.role, self.scopes, self.id, self.until_ms)


class Keys:
    """The API keys of one server; thread-safe, and every change is on disk before its method returns."""

    def __init__(self, folder: Path, pepper: bytes | None = None) -> None:
        self._path, self._given = folder / "keys.json", pepper
        self._lock = threading.Lock()  # serialises changes
        self._known: dict[str, Key] = {key.id: key for key in _read(self._path)}
        self._unwritten: dict[str, Key] = {}  # revoked keys that the file still has

    @property
    def signing(self) -> bytes:
        """Return the secret that signs tickets; only this server verifies them."""
        return self._hash(b"tickets")

    def __len__(self) -> int:
        return len(self._known)

    def create(
        self,
        name: str,
        role: str,
        scopes: tuple[Scope, ...] | None = None,
        until_ms: int | None = None,
        *,
        now_ms: int | None = None,
    ) -> tuple[str, Key]:
        """Create a key; return its text, which is not stored, and its record; LimitExceeded at too many keys."""
        created_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        secret = secrets.token_urlsafe(32)
        id = "".join(secrets.choice(_ALPHABET) for _ in range(12))
        made = Key(id, name, role, self._hash(secret.encode()), created_ms, scopes, until_ms)
        with self._lock:
            if len(self._known) >= MOST:
                raise LimitExceeded(
                    f"the limit of {MOST} API keys is reached", hint="Revoke some with security.token.revoke."
                )
            self._write({**self._known, id: made})
        return f"hw_{id}_{secret}", made

    def all(self) -> list[Key]:
        """Return all keys, oldest first."""
        return sorted(self._known.values(), key=lambda key: (key.created_ms, key.id))

    def revoke(self, id: str, is_seen: Callable[[Key], bool] = lambda key: True) -> Key:
        """Revoke a key and return it; NotFound also for a key that the caller may not see.

        The key ends even if StorageFull is raised, until a restart reads the file again.
        """
        with self._lock:
            found = self._known.get(id) or self._unwritten.get(id)
            if found is None or not is_seen(found):
                raise NotFound(
                    f"there is no key {id!r}",
                    hint="List the keys with `headwater token list` or security.token.list.",
                )
            self._known = {name: key for name, key in self._known.items() if name != id}
            self._unwritten[id] = found
            self._write(
                self._known, "The key is revoked until the next start: free space on the disk, revoke it again."
            )
        return found

    def find(self, text: bytes) -> Key | None:
        """Return the key with this text, also if it has expired; None if there is none.

        The comparison takes the same time for every wrong secret.
        """
        parts = _KEY.match(text)
        if parts is None:
            return None
        found = self._known.get(parts[1].decode())
        hashed = self._hash(parts[2])
        return found if hmac.compare_digest(hashed, b"\0" * 32 if found is None else found.hash) else None

    def has(self, id: str) -> bool:
        """Return whether a key with this id exists and was not revoked."""
        return id in self._known

    @functools.cached_property
    def _pepper(self) -> bytes:
        return _pepper(self._path.parent) if self._given is None else self._given

    def _hash(self, secret: bytes) -> bytes:
        return hmac.digest(self._pepper, secret, "sha256")

    def _write(self, known: dict[str, Key], hint: str = "No key was changed: free space on the disk, retry.") -> None:
        try:
            write_whole(self._path, msgspec.json.encode(list(known.values())))
        except OSError as error:
            raise StorageFull(f"the API keys cannot be written: {error.strerror}", hint=hint) from error
        self._known = known
        self._unwritten.clear()


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file by `content` atomically and durably; only the owner may read it."""
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> list[Key]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Key])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path.name} is damaged: {error}", hint="Restore it from a backup, or create new keys."
        ) from None


def _pepper(folder: Path) -> bytes:
    """Return the secret of the hashes from the file `pepper`, created at first use; ConfigError if it is too short."""
    path = folder / "pepper"
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = secrets.token_bytes(32)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, found)
    if len(found) < 32:
        raise ConfigError("the file `pepper` is damaged", hint="Restore it from a backup, or create new keys.")
    return found
