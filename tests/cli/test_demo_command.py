"""The demo ends by itself, proves what it says, and leaves nothing behind."""

import os
import re
import tempfile
from pathlib import Path

import pytest
from commands import run


@pytest.mark.slow
def test_the_demo_ends_by_itself_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("demo", env={"TMPDIR": str(tmp_path), "HEADWATER_DATA": str(tmp_path / "mine")})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "\x1b" not in done.stdout, "no colours outside a terminal"
    assert list(tmp_path.iterdir()) == []
    for proof in (
        "the log still ends at offset",
        "the log folds to the 3 rows",
        "acknowledged orders",
        "without a hole",
    ):
        assert f"✓ {proof}" in done.stdout or re.search(rf"✓ .*{proof}", done.stdout), proof
    for pid in map(int, re.findall(r"process (\d+)", done.stdout)):
        assert not Path(f"/proc/{pid}").exists() or pid == os.getpid(), "a process of the demo is still there"
    assert tempfile.gettempdir() not in done.stdout
