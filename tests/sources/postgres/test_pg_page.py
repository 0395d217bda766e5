"""The first four commands of docs/postgres.md, on a real server."""

import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

from tests.cli.cli_process import HEADWATER, TIMEOUT, environment, run, served
from tests.doc_pages import ROOT, blocks, page
from tests.sources.postgres.pg_source import shared_server

NAME = f"page_{os.getpid()}"


def commands() -> list[list[str]]:
    """Return the commands of both terminals, each as a list of words."""
    (_, first), (_, second), *_ = blocks(page("docs/postgres.md"), "bash")
    return [shlex.split(line, comments=True) for line in (first + second).splitlines()]


def test_four_commands_lead_to_a_live_feed(tmp_path: Path) -> None:
    psql, doctor, serve, tail = commands()
    server = shared_server()
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {NAME}")
    url = f"postgresql://postgres@/{NAME}?host={server.folder}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "the extra is `[postgres]`" in page("docs/postgres.md") and extras["postgres"]
    with server.connect(NAME) as db:
        db.execute("CREATE TABLE orders(id int PRIMARY KEY, total numeric)")
        db.execute(psql[psql.index("-c") + 1])
        there = [word.replace("postgresql://postgres@db.example/shop", url) for word in doctor]
        done = run(*there[1:], "--data", "data", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        there = [word.replace("postgresql://postgres@db.example/shop", url) for word in serve[2:]]
        with served(tmp_path, *there) as found:
            db.execute("INSERT INTO orders VALUES (1, 9.5)")
            shown = subprocess.run(
                [*HEADWATER, *tail[1:], "--limit", "1", "-o", "json", "--server", found.url],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout.splitlines()[0])["after"] == {"id": 1, "total": "9.5"}
