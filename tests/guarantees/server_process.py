"""The real server as a separate process, to be called, paused, ended and killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tests.suite.deadlines import PATIENCE
from tests.suite.fork_server import ForkedProcess
from tests.suite.server_launch import start_server

READY = re.compile(r"headwater ready at (\S+)(?: grpc (\S+))?")
START_SECONDS = 180.0  # a machine may be busy; this is for a start that hangs


class Refused(Exception):
    """The server answered with an error envelope."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.code = str(error["code"])


class Gone(Exception):
    """There was no answer: the request may or may not have been executed."""


class Asking:
    """One client's connection; each thread needs its own."""

    def __init__(self, server: ServerProcess, timeout: float = PATIENCE) -> None:
        self._server = server
        self._http = httpx.Client(timeout=timeout, transport=httpx.HTTPTransport(retries=0))

    def __call__(self, method: str, **params: Any) -> Any:
        """Return the result of an RPC; raise Refused for an error, Gone without an answer."""
        try:
            answer = self._http.post(
                self._server.url + "/api/v1/rpc", json={"id": 1, "method": method, "params": params}
            ).json()
        except (httpx.HTTPError, ValueError) as error:
            raise Gone(str(error)) from error
        if not answer["ok"]:
            raise Refused(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._http.close()


class ServerProcess:
    """`headwater serve` over one data folder, with settings from a file and without the test's variables."""

    def __init__(
        self,
        folder: Path,
        settings: str = "",
        http: str = "127.0.0.1:0",
        databases: Sequence[str] = (),
        said: Path | None = None,
        *,
        forked: bool = True,
    ) -> None:
        self.folder, self._http, self._databases = folder, http, databases
        self._forked = forked
        self._grpc = "127.0.0.1:0" if http.endswith(":0") else "off"
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "headwater.toml"
        self.configure(settings)
        self.said = said or folder / "server.err"  # what it wrote to stderr
        self._errors = self.said.open("ab")
        self._process: subprocess.Popen[str] | ForkedProcess | None = None
        self.url = ""
        self.grpc = ""  # its address; none where it is off

    def configure(self, settings: str) -> None:
        """Replace the settings for the next start."""
        self._config.write_text(settings)

    def launch(self) -> None:
        """Start without waiting, so that it can be killed during the start."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        arguments = [*self._databases, "--config", str(self._config), "--data", str(self.folder)]
        self._process = start_server(
            [*arguments, "--http", self._http, "--grpc", self._grpc],
            env=environment,
            stderr=self._errors,
            forked=self._forked,
        )

    def start(self) -> None:
        """Start and wait until the server reports that it is ready."""
        self.launch()
        assert self._process is not None and self._process.stdout is not None
        late = threading.Timer(START_SECONDS, self._process.kill)
        late.start()
        found = READY.search(self._process.stdout.readline())
        late.cancel()
        assert found, f"the server did not start:\n{self.last_words()}"
        self.url, self.grpc = found[1], found[2] or ""

    @property
    def is_running(self) -> bool:
        """Return whether it was neither ended nor killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send it a signal by its pid."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._over(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM; fail unless it exits with 0."""
        code = self._over(signal.SIGTERM)
        assert code == 0, f"the server ended with {code}:\n{self.last_words()}"

    def _over(self, number: int) -> int:
        process = self._process
        if process is None:
            return 0
        self._process = None
        os.kill(process.pid, number)
        try:
            return process.wait(PATIENCE)
        finally:
            assert process.stdout is not None
            process.stdout.close()

    def wait_caught_up(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the log has everything committed in the database; return the database's status."""
        ask, end = Asking(self), time.monotonic() + seconds
        try:
            while True:
                found: dict[str, Any] = ask("stats.snapshot")["databases"]["main"]
                if found["lag_changes"] == 0 and not found.get("error"):
                    return found
                assert time.monotonic() < end, f"the log does not catch up: {found}"
                time.sleep(0.02)  # asking again at once would only keep it from working
        finally:
            ask.close()

    def last_words(self) -> str:
        """Return the end of its stderr."""
        self._errors.flush()
        return self.said.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Kill it if it runs."""
        if self._process is not None:
            self.kill()
        self._errors.close()
