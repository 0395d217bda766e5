"""Connections leave file descriptors to databases and the log, whatever `serve.max_connections` says."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.serve.limits.connection_limits import MIN_SPARE_FILES, RESERVE, connections_for, spare_files
from headwater.serve.server import server

HEAD = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@contextlib.contextmanager
def connections(address: tuple[str, int], number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(number)]


@pytest.mark.parametrize("ports", [1, 2])
@pytest.mark.parametrize("files", [600, 1_024, 4_096, 65_536, 1 << 20])
def test_connections_on_all_ports_leave_the_spare_files(files: int, ports: int) -> None:
    assert ports * (connections_for(files, ports=ports) + RESERVE) <= files - spare_files(files)
    assert spare_files(files) >= max(MIN_SPARE_FILES, files // 5)


def test_tiny_limit_of_open_files_still_allows_connections() -> None:
    assert connections_for(64, ports=2) == 8
    assert connections_for(1, ports=2) == 1


def test_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("the hard limit of open files is none")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        with serving(NoDatabases()):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_limit_of_open_files_lowers_max_connections_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "raise_open_files", lambda: 400)
    allowed = connections_for(400, ports=2)
    with serving(NoDatabases(), max_connections=1_000) as client:
        warned = [each.getMessage() for each in caplog.records if "serve.max_connections" in each.getMessage()]
        assert len(warned) == 1 and str(allowed) in warned[0] and "400 files" in warned[0]
        with connections(client.server.addresses[0], allowed):
            assert client.http.get("/healthz").status_code == 200
            with connections(client.server.addresses[0], 1) as (last,):
                last.sendall(HEAD)
                answer = last.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 429") and b"ulimit -n" in answer


def test_high_limit_of_open_files_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "raise_open_files", lambda: 65_536)
    with serving(NoDatabases()) as client:
        assert client.server._config.max_connections == 20_000
        assert client.server._grpc._connections._most == connections_for(65_536, ports=2) // 3, "three files for each"
    assert not [each for each in caplog.records if "serve.max_connections" in each.getMessage()]


@pytest.mark.slow
def test_more_connections_than_files_leave_capture_running(tmp_path: Path) -> None:
    program = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))\n"
    program += "sys.argv[0] = 'headwater'; runpy.run_module('headwater', run_name='__main__')"
    arguments = ["serve", "main.db", "--http", "127.0.0.1:0", "--grpc", "off", "--data", "data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=log,
            env={name: value for name, value in os.environ.items() if not name.startswith("HEADWATER")},
        )
    try:
        assert process.stdout is not None
        url = httpx.URL(process.stdout.readline().split()[3].decode())
        kept = httpx.Limits(keepalive_expiry=None)  # a new connection would be one too many
        with httpx.Client(base_url=url, timeout=PATIENCE, limits=kept) as http:

            def run(sql: str) -> None:
                asked = {"id": 1, "method": "sql.exec", "params": {"sql": sql}}
                assert http.post("/api/v1/rpc", json=asked).json()["ok"]

            run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
            with connections((url.host, url.port or 0), 700):
                run("INSERT INTO t VALUES (1)")
                headers = {"accept": "application/x-ndjson"}
                with http.stream("GET", "/api/v1/changes/main/t?from_offset=0", headers=headers) as changes:
                    assert changes.status_code == 200 and any('"insert"' in line for line in changes.iter_lines())
    finally:
        process.terminate()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said and "serve.max_connections" in said, said
