"""Forked processes behave as those that are started: arguments, environment, folder, files and exit status."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.suite.fork_server import fork_server

ECHO = """
import json, os, sys
print(json.dumps([sys.argv, dict(os.environ), os.getcwd(), sys.stdin.read(), __name__]))
print("said", file=sys.stderr)
sys.exit(7)
"""


def test_forked_program_has_the_given_arguments_environment_folder_and_stdin(tmp_path: Path) -> None:
    done = fork_server("json").run(
        {"code": ECHO}, ["a", Path("b c")], env={"X": "ü"}, cwd=tmp_path, stdin="given", timeout=60
    )
    assert (done.returncode, done.stderr) == (7, "said\n")
    assert json.loads(done.stdout) == [["-c", "a", "b c"], {"X": "ü"}, str(tmp_path), "given", "__main__"]


def test_forked_programs_share_nothing() -> None:
    code = "import json, atexit; print(hasattr(json, 'mine')); json.mine = 1; atexit.register(print, 'over')"
    done = [fork_server("json").run({"code": code}, [], env={}, timeout=60) for _ in range(2)]
    assert [each.stdout for each in done] == ["False\nover\n"] * 2


def test_signal_and_error_are_the_exit_status() -> None:
    server = fork_server("json")
    assert server.run({"code": "import os; os.kill(os.getpid(), 9)"}, [], env={}, timeout=60).returncode == -9
    failed = server.run({"code": "1 / 0"}, [], env={}, timeout=60)
    assert failed.returncode == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server("json").run({"code": "import time; time.sleep(600)"}, [], env={}, timeout=0.2)


def test_started_program_runs_beside_the_test_until_it_is_killed(tmp_path: Path) -> None:
    code = "import os, sys, time; print(os.getpid(), flush=True); print('said', file=sys.stderr); time.sleep(600)"
    with (
        (tmp_path / "errors").open("w") as errors,
        fork_server("json").start({"code": code}, [], env={}, stderr=errors) as process,
    ):
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(60) == process.poll() == -9
        assert process.stdout.read() == ""
        assert not Path("/proc", str(process.pid)).exists()
    assert (tmp_path / "errors").read_text() == "said\n"


def test_ended_program_keeps_its_number_until_its_status_is_read(tmp_path: Path) -> None:
    with (
        (tmp_path / "errors").open("w") as errors,
        fork_server("json").start({"code": "import sys; sys.exit(3)"}, [], env={}, stderr=errors) as process,
    ):
        assert process.stdout is not None and process.stdout.read() == ""
        os.kill(process.pid, 0)
        assert process.wait(60) == 3
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
        process.terminate()
