"""The program of docs/changefeed.md as it stands there, with messages made by the command above it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.doc_pages import ROOT, blocks, page
from tests.guarantees.server_process import ServerProcess
from tests.suite.deadlines import PATIENCE

TOKEN = "key-of-the-test"
SETTINGS = f'serve.token = "{TOKEN}"\nfeeds.checkpoint_seconds = 0.1\n'


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Create a folder with the documented program and its generated messages."""
    pytest.importorskip("grpc_tools")
    ((_, command),) = blocks(page("docs/changefeed.md"), "bash")
    name, *words = shlex.split(command)
    assert name == "python"
    made = [word.replace("_out=.", f"_out={tmp_path}") for word in words]
    subprocess.run([sys.executable, *made], cwd=ROOT, check=True, timeout=PATIENCE)
    ((_, body),) = blocks(page("docs/changefeed.md"), "python")
    (tmp_path / "follow.py").write_text(body)
    return tmp_path


def followed(folder: Path, server: ServerProcess, count: int) -> list[str]:
    """Run the program until it has printed `count` lines and stored a checkpoint after them; return the lines."""
    kept = folder / "orders.checkpoint"
    text = (folder / "follow.py").read_text()
    assert "127.0.0.1:7172" in text
    with subprocess.Popen(
        [sys.executable, "-c", text.replace("127.0.0.1:7172", server.grpc)],
        cwd=folder,
        env={"HEADWATER_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().rstrip() for _ in range(count)]
            before, end = read(kept), time.monotonic() + PATIENCE
            while read(kept) in (b"", before):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        finally:
            process.kill()
    return lines


def read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


@pytest.mark.slow
def test_changefeed_program_starts_at_the_log_start_and_resumes_at_its_last_position(
    program: Path, tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "data", SETTINGS)

    def sql(text: str) -> Any:
        body = {"id": 1, "method": "sql.exec", "params": {"sql": text}}
        answer = httpx.post(f"{server.url}/api/v1/rpc", json=body, headers={"authorization": f"Bearer {TOKEN}"}).json()
        assert answer["ok"], answer

    try:
        server.start()
        sql("CREATE TABLE orders(id INTEGER PRIMARY KEY, item TEXT)")
        sql("INSERT INTO orders(item) VALUES ('lamp'), ('desk')")
        assert followed(program, server, 2) == ['put {"id":1,"item":"lamp"}', 'put {"id":2,"item":"desk"}']
        sql("DELETE FROM orders WHERE id = 1")
        assert followed(program, server, 1) == ['delete {"id":1,"item":"lamp"}']
        server.stop()
    finally:
        server.close()
