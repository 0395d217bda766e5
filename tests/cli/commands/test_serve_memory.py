"""A server frees the memory of statements that SQLite ended at its limit."""

import re
from pathlib import Path

import httpx
import pytest
from tests.cli.cli_process import TIMEOUT, script, served

MIB = 1 << 20
# Sorts blobs of a megabyte until the limit of SQLite's memory ends it.
LARGE = """WITH RECURSIVE r(x, b) AS (SELECT 1, zeroblob(1000000) UNION ALL SELECT x + 1, zeroblob(1000000 + x) FROM r)
SELECT count(*) FROM (SELECT b FROM r ORDER BY b)"""


def resident(process: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.slow
def test_memory_of_refused_statements_is_returned(tmp_path: Path) -> None:
    script(tmp_path / "one.db", "CREATE TABLE t(k INTEGER PRIMARY KEY)")
    body = {"id": 1, "method": "query.select", "params": {"sql": LARGE}}
    with served(tmp_path, "one.db", "--wal", forked=False) as server:
        for _ in range(2):
            answer = httpx.post(f"{server.url}/api/v1/rpc", json=body, timeout=TIMEOUT).json()
            assert answer["error"]["code"] in ("busy", "answer_too_large")
        assert resident(server.process.pid) < 300 * MIB
