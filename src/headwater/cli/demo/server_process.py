"""A server in its own process: started, called, killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headwater.cli.failure import Failure
from headwater.cli.remote import Remote

STOP_SECONDS = 15.0


def clean_environment() -> dict[str, str]:
    """Return the environment without our settings: the demo must not touch a configured server's files."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "SKEINDB_"))}


class ServerProcess:
    """`headwater serve` on a free port."""

    def __init__(self, data: Path, databases: Sequence[str] = (), settings: Mapping[str, str] = {}) -> None:
        command = [sys.executable, "-m", "headwater", "serve", *databases, "--data", str(data), "--http", "127.0.0.1:0"]
        started = time.perf_counter()
        self._errors = (data / "server.err").open("ab")
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, env=clean_environment() | dict(settings), text=True
        )
        self.pid = self._process.pid
        try:
            self.url = self._ready_url(data)
        except BaseException:
            self.stop()
            raise
        self.seconds = time.perf_counter() - started  # from exec to the first answer
        self.remote = Remote(self.url)

    def _ready_url(self, data: Path) -> str:
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if words[:3] != ["headwater", "ready", "at"]:
            self._process.wait()
            raise Failure(f"the server did not start: {(data / 'server.err').read_text().strip()}")
        return words[3]

    def kill(self) -> None:
        """Send SIGKILL: the server cannot write anything more."""
        os.kill(self.pid, signal.SIGKILL)
        self._release()

    def stop(self) -> None:
        """Send SIGTERM and wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._release()

    def _release(self) -> None:
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if hasattr(self, "remote"):
            self.remote.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
