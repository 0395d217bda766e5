"""The session: quiet, on the right Python and Java, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headwater.errors import ConfigError
from headwater.pipeline import session
from headwater.pipeline.failure import explain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def settings(master: str = "local[2]", conf: dict[str, str] | None = None, short_lived: bool = False) -> dict[str, str]:
    return session._settings(master, "name", (), conf or {}, Path("nowhere"), short_lived)


def test_only_a_local_master_is_bound_to_loopback() -> None:
    assert settings()["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in settings("spark://host:7077")


def test_what_the_caller_sets_wins_and_java_options_are_joined() -> None:
    told = settings(conf={"spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Dmine=1"}, short_lived=True)
    assert told["spark.ui.enabled"] == "true"
    options = told["spark.driver.extraJavaOptions"].split()
    assert "-Dmine=1" in options and "-XX:TieredStopAtLevel=1" in options
    assert any(option.startswith("-Dlog4j2.configurationFile=file:") for option in options)


def test_jars_that_do_not_exist_are_refused_before_java_is_started() -> None:
    with pytest.raises(ConfigError):
        session._settings("local", "name", ["detla"], {}, Path("nowhere"), False)


def test_logs_of_processes_that_are_gone_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_folder", lambda: tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (tmp_path / f"{pid}.log").touch()
    session._forget_old_logs()
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.log"]


def test_workers_run_this_python(spark: SparkSession) -> None:
    def where(batches):
        import sys

        import pyarrow as pa

        yield from (pa.record_batch({"python": [sys.executable]}) for _ in batches)

    assert spark.range(1).mapInArrow(where, "python string").first()["python"] == sys.executable


def test_a_failure_in_a_worker_is_one_clear_line_and_nothing_is_printed(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(batches):
        raise ZeroDivisionError("by hand")

    with pytest.raises(Exception) as caught:
        spark.range(1).mapInArrow(fail, "id bigint").collect()
    assert explain(caught.value) == "ZeroDivisionError: by hand (pipeline_failed)."
    with pytest.raises(Exception) as caught:
        spark.sql("SELECT nothing FROM nowhere")
    assert "nowhere" in explain(caught.value) and "\n" not in explain(caught.value)
    assert capfd.readouterr() == ("", "")
    assert "by hand" in session.log_file().read_text()


TWICE = """
from headwater.pipeline.session import close_session, open_session
for _ in range(2):
    session = open_session(short_lived=True)
    assert session.range(3).count() == 3
    close_session(session)
"""
BAD = """
from headwater.pipeline.failure import explain
from headwater.pipeline.session import open_session
try:
    open_session(conf={"spark.driver.memory": "a lot"})
except Exception as error:
    print(explain(error))
"""


def run(program: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program]
    environ = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder, timeout=300)


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
def test_sessions_come_and_go_in_one_process_without_a_word(tmp_path: Path) -> None:
    done = run(TWICE, tmp_path, "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
def test_a_spark_that_does_not_start_says_why_in_one_line(tmp_path: Path) -> None:
    done = run(BAD, tmp_path)
    assert done.stderr == "" and done.stdout.count("\n") == 1
    assert done.stdout.startswith("Spark did not start: ") and "a lot" in done.stdout
