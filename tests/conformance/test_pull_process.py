"""The bulk worker of a real server: it ends with the server, however that ends, and never reads another database's
file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.capture.captured_database import foreign
from tests.conformance.live_server import Live
from tests.conformance.test_pull import ended, log_url, problem, rows, snapshot_url, version_of
from tests.suite.deadlines import PATIENCE

TOKEN = "s3cret-token"


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


class Served:
    """`headwater serve` in a separate process."""

    def __init__(self, folder: Path, temporary: Path | None = None) -> None:
        self.temporary = temporary or Path(tempfile.mkdtemp())  # its path is short enough for sockets in it
        elsewhere = folder / "elsewhere"  # with a file in it that must never be imported
        elsewhere.mkdir()
        (elsewhere / "msgspec.py").write_text("raise SystemExit('imported from the working directory')")
        command = "from headwater.cli.main import main; raise SystemExit(main())"
        where = ["--data", str(folder / "data"), "--http", "127.0.0.1:0", "--grpc", "off"]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", command, "serve", *where],
            cwd=elsewhere,
            env={
                **os.environ,
                "HEADWATER_TOKEN": TOKEN,
                "HEADWATER_JWT_SECRET": f"{TOKEN} of at least thirty-two bytes",
                "HEADWATER_KEY_PEPPER": f"{TOKEN} of as many bytes, or even more",
                "HEADWATER_SERVE_TOKEN": f"{TOKEN}-by-its-other-name",
                "HEADWATER_SERVE_JWT_SECRET": f"{TOKEN} of at least thirty-two bytes",
                "HEADWATER_SERVE_KEY_PEPPER": f"{TOKEN} of as many bytes, or even more",
                "TMPDIR": str(self.temporary),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if "ready at" in line)
        self.http = httpx.Client(
            base_url=line.split()[3], timeout=PATIENCE, headers={"authorization": f"Bearer {TOKEN}"}
        )

    def pulled(self) -> int:
        """Pull once; return the pid of the worker process."""
        body = {
            "id": 1,
            "method": "sql.exec",
            "params": {"sql": "CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY)"},
        }
        assert self.http.post("/api/v1/rpc", json=body).json()["ok"]
        response = self.http.get("/api/v1/pull/main/t/snapshot", follow_redirects=True)
        assert response.status_code == 200, response.text
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (worker,) = {pid for path in threads for pid in path.read_text().split()}
        return int(worker)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.temporary)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_worker_and_its_temporary_files_end_with_the_server(served: Served, how: signal.Signals) -> None:
    worker = served.pulled()
    (folder,) = served.temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700, "nobody else may ask it"
    served.process.send_signal(how)
    served.process.wait(PATIENCE)
    eventually(lambda: ended(worker))
    eventually(lambda: not list(served.temporary.iterdir()))


def test_worker_does_not_receive_secrets_by_any_of_their_names(served: Served) -> None:
    worker = served.pulled()
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{worker}/{name}").read_bytes()


def test_pull_succeeds_when_the_temporary_path_is_longer_than_a_socket_path(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    served = Served(tmp_path, deep)
    try:
        served.pulled()
    finally:
        served.close()


def test_worker_has_a_lower_priority_than_its_server(served: Served) -> None:
    worker = served.pulled()
    assert os.getpriority(os.PRIO_PROCESS, worker) > os.getpriority(os.PRIO_PROCESS, served.process.pid)


def test_version_of_a_replaced_database_file_returns_410(start: Callable[..., Live], tmp_path: Path) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    live.sql("INSERT INTO t VALUES (1, 'old')")
    before = version_of(live, "t")
    assert len(rows(live, snapshot_url("t", before))) == 1
    other = tmp_path / "other.db"
    foreign(
        other,
        "PRAGMA journal_mode = WAL",
        "CREATE TABLE t(id INTEGER PRIMARY KEY, v)",
        "INSERT INTO t VALUES (2, 'new')",
    )
    file = Path(live.config.data) / "main.db"
    for suffix in ("-wal", "-shm"):  # as a restore does: SQLite would read them into any file of that name
        file.with_name(file.name + suffix).unlink()
    os.replace(other, file)
    live.until(lambda: generation_of(live) not in ("", before.split(".")[0]))
    for url in (snapshot_url("t", before), log_url("t", 0, 1, generation=before.split(".")[0])):
        assert problem(live, url, 410)["resnapshot_reason"] == "log_generation_changed"
    assert [row["id"] for row in rows(live, snapshot_url("t", version_of(live, "t")))] == [2]


def generation_of(live: Live) -> str:
    """Return the reported generation; "" while a new one begins."""
    answer = live.rpc("pull.describe", table="t")
    return answer["result"]["generation"] if answer["ok"] else ""
