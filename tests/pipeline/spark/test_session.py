"""The session: no output, the right Python and Java, and no files left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from headwater.errors import ConfigError, PipelineError
from headwater.pipeline.failure import explain
from headwater.pipeline.spark import session, worker_daemon

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def settings(master: str = "local[2]", conf: dict[str, str] | None = None, short_lived: bool = False) -> dict[str, str]:
    return session._settings(master, "name", (), conf or {}, Path("nowhere"), short_lived)


def test_only_a_local_master_is_bound_to_loopback() -> None:
    assert settings()["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in settings("spark://host:7077")


def test_only_java_of_a_local_master_gets_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    with session._loopback("local[2]"):
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    with session._loopback("spark://host:7077"):
        assert "SPARK_LOCAL_IP" not in os.environ
    monkeypatch.setenv("SPARK_LOCAL_IP", "0.0.0.0")
    with session._loopback("local[2]"):
        assert os.environ["SPARK_LOCAL_IP"] == "0.0.0.0"
    assert os.environ["SPARK_LOCAL_IP"] == "0.0.0.0"


def test_caller_settings_override_defaults_and_java_options_are_joined() -> None:
    told = settings(conf={"spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Dmine=1"}, short_lived=True)
    assert told["spark.ui.enabled"] == "true"
    options = told["spark.driver.extraJavaOptions"].split()
    assert "-Dmine=1" in options and "-XX:TieredStopAtLevel=1" in options
    assert any(option.startswith("-Dlog4j2.configurationFile=file:") for option in options)


@pytest.mark.parametrize(
    ("memory", "most"), [(None, "256m"), ("4g", "1024m"), ("512M", "128m"), ("2048mb", "512m"), ("1024k", "1m")]
)
def test_max_result_size_is_derived_from_the_driver_memory(memory: str | None, most: str) -> None:
    told = settings(conf={"spark.driver.memory": memory} if memory else {})
    assert told["spark.driver.maxResultSize"] == most
    assert settings(conf={"spark.driver.maxResultSize": "3g"})["spark.driver.maxResultSize"] == "3g"


def test_spark_settings_are_passed_in_a_file_with_mode_600(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_folder", lambda: tmp_path)
    for given in (None, "--verbose pyspark-shell"):
        if given:
            monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", given)
        with pytest.raises(ZeroDivisionError), session._properties({"spark.a": "s3cret"}):
            (file,) = tmp_path.iterdir()
            assert file.stat().st_mode & 0o777 == 0o600
            told = os.environ["PYSPARK_SUBMIT_ARGS"]
            assert str(file) in told and told.endswith(given or "pyspark-shell") and "s3cret" not in told
            raise ZeroDivisionError
        assert list(tmp_path.iterdir()) == []
        assert os.environ.get("PYSPARK_SUBMIT_ARGS") == given
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--properties-file mine pyspark-shell")
    with pytest.raises(ConfigError, match="one properties file"), session._properties({"spark.a": "s3cret"}):
        pass


def test_unknown_jars_are_refused_before_java_starts() -> None:
    with pytest.raises(ConfigError):
        session._settings("local", "name", ["detla"], {}, Path("nowhere"), False)


def test_spark_logs_of_dead_processes_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_folder", lambda: tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (tmp_path / f"{pid}.log").touch()
        (tmp_path / f"{pid}.home").mkdir()
        (tmp_path / f"{pid}.home" / "jars").symlink_to(tmp_path)
    session._forget_old_logs()
    assert {path.name for path in tmp_path.iterdir()} == {f"{os.getpid()}.log", f"{os.getpid()}.home"}


def test_session_folder_writable_by_everyone_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session._folder().chmod(0o777)
    with pytest.raises(PipelineError, match="others may write there"):
        session.log_file()


def test_workers_run_this_python_and_its_installed_pyspark(spark: SparkSession) -> None:
    def where(batches):
        import sys

        import pyarrow as pa
        import pyspark

        found = {"python": [sys.executable], "pyspark": [pyspark.__file__], "loaded": ["sqlalchemy" in sys.modules]}
        yield from (pa.record_batch(found) for _ in batches)

    found = spark.range(1).mapInArrow(where, "python string, pyspark string, loaded boolean").first()
    assert tuple(found) == (sys.executable, pyspark.__file__, True)


def test_workers_neither_search_the_spark_jar_nor_collect_the_loaded_modules(spark: SparkSession) -> None:
    def state(batches):
        import gc
        import sys

        import pyarrow as pa

        searched = [path for path in (*sys.path, *sys.path_importer_cache) if "spark-core" in path]
        modules = [id(vars(sys.modules[name])) for name in ("pandas", "headwater.pipeline.spark.datasource")]
        collected = [each for each in gc.get_objects() if id(each) in modules]
        found = {"jars": [len(searched)], "frozen": [gc.get_freeze_count() > 0], "collected": [len(collected)]}
        yield from (pa.record_batch(found) for _ in batches)

    found = spark.range(1).mapInArrow(state, "jars bigint, frozen boolean, collected bigint").first()
    assert tuple(found) == (0, True, 0)


def test_only_the_spark_jar_is_dropped_from_the_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    jar, other = "/spark/jars/spark-core_2.13-4.2.0.jar", "/mine/spark-core.zip"
    monkeypatch.setattr(sys, "path", ["", jar, other, "/mine/functions.jar"])
    monkeypatch.setattr(sys, "path_importer_cache", dict.fromkeys((jar, f"{jar}/org", other)))
    worker_daemon.drop_spark_jar()
    assert sys.path == ["", other, "/mine/functions.jar"]
    assert list(sys.path_importer_cache) == [other]
    worker_daemon.drop_spark_jar()
    assert list(sys.path_importer_cache) == [other]


def test_worker_modules_are_found_and_start_no_thread() -> None:
    script = (
        "import os, importlib\n"
        "from headwater.pipeline.spark.worker_daemon import LOADED\n"
        "import pyarrow, pandas\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "for name in LOADED:\n    importlib.import_module(name)\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_worker_failure_is_explained_in_a_single_line_and_prints_nothing(
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
from headwater.pipeline.spark.session import close_session, open_session
for _ in range(2):
    session = open_session(short_lived=True)
    assert session.range(3).count() == 3
    close_session(session)
"""
KILLED = """
import signal, threading
from pathlib import Path
from pyspark import SparkContext
from headwater.pipeline.spark.session import close_session, open_session

def ask():
    clock = session.sparkContext._jvm.java.lang.System
    clock.nanoTime()
    connected.set()
    stopped.wait()
    try:
        clock.nanoTime()
    except Exception:
        return
    raise AssertionError("Java is still there")

def unread(port):
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    return any(f[1].endswith(f":{port:04X}") and not f[4].endswith(":00000000") for f in sockets[1:])

session = open_session(short_lived=True)
gateway = SparkContext._gateway
connected, stopped = threading.Event(), threading.Event()
asked = threading.Thread(target=ask)  # a call that Java leaves unread ends with a reset: py4j logs its traceback
asked.start()
connected.wait()
gateway.proc.send_signal(signal.SIGSTOP)
stopped.set()
while not unread(gateway.gateway_parameters.port):
    pass
gateway.proc.kill()
gateway.proc.wait()
asked.join()
close_session(session)
session = open_session(short_lived=True)
assert session.range(3).count() == 3
close_session(session)
"""
SECRET = """
import os
from pathlib import Path
from pyspark import SparkContext
from headwater.pipeline.spark.session import close_session, open_session
odd = r"s3cret \\ # = : ! \u00fc \U0001f600 'x' $y"
conf = {
    "spark.hadoop.fs.s3a.secret.key": odd,
    "spark.my.key:of=mine": "s3cret",
    "spark.driver.memory": "600m",
    "spark.driver.extraJavaOptions": "-Dmine=1",
    "spark.sql.shuffle.partitions": "3",
}
session = open_session(short_lived=True, conf=conf)
lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
java = SparkContext._gateway.proc.pid
assert b"java" in lines[str(java)] and b"-Xmx600m" in lines[str(java)] and b"-Dmine=1" in lines[str(java)]
assert b"s3cret" not in lines[str(java)]
assert b"s3cret" not in Path(f"/proc/{java}/environ").read_bytes()
found = dict(session.sparkContext.getConf().getAll())
assert {name: found[name] for name in conf if "Java" not in name} == {n: v for n, v in conf.items() if "Java" not in n}
assert "-Dmine=1" in found["spark.driver.extraJavaOptions"]
assert found["spark.driver.maxResultSize"] == "150m" and session.conf.get("spark.sql.shuffle.partitions") == "3"
assert not list(Path(os.environ["TMPDIR"]).rglob("*.properties.*")) and "PYSPARK_SUBMIT_ARGS" not in os.environ
left = [path.name for path in Path(os.environ["TMPDIR"]).rglob("*.properties")]
assert left == [f"{os.getpid()}.log4j2.properties"], left
close_session(session)
"""
UI = """
import os
from pathlib import Path
from urllib.request import urlopen
from headwater.pipeline.spark.session import close_session, open_session
session = open_session(short_lived=True, conf={"spark.ui.enabled": "true", "spark.ui.port": "0"})
url = session.sparkContext.uiWebUrl
assert urlopen(url).status == 200
port = int(url.rpartition(":")[2])
sockets = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
heard = {f[1].rpartition(":")[0] for f in sockets if f[3] == "0A" and f[1].endswith(f":{port:04X}")}
assert heard and heard <= {"0100007F", "0000000000000000FFFF00000100007F"}, heard
assert "SPARK_LOCAL_IP" not in os.environ
close_session(session)
"""
BAD = """
from headwater.pipeline.failure import explain
from headwater.pipeline.spark.session import open_session
try:
    open_session(conf={"spark.driver.memory": "a lot"})
except Exception as error:
    print(explain(error))
"""


def run(program: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program]
    environ = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder, timeout=300)


@pytest.mark.soak(seconds=40, every_time=True)
@pytest.mark.spark
def test_sessions_opened_twice_in_a_process_print_nothing(tmp_path: Path) -> None:
    done = run(TWICE, tmp_path, "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.soak(seconds=40, every_time=True)
@pytest.mark.spark
def test_session_with_a_dead_java_process_is_closed_and_reopened(tmp_path: Path) -> None:
    done = run(KILLED, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.soak(seconds=15, every_time=True)
@pytest.mark.spark
def test_ui_of_a_local_session_listens_on_loopback_only(tmp_path: Path) -> None:
    done = run(UI, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.soak(seconds=15, every_time=True)
@pytest.mark.spark
def test_settings_reach_spark_without_appearing_on_the_java_command_line(tmp_path: Path) -> None:
    done = run(SECRET, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.spark
def test_failed_spark_start_is_reported_in_a_single_line(tmp_path: Path) -> None:
    done = run(BAD, tmp_path)
    assert done.stderr == "" and done.stdout.count("\n") == 1
    assert done.stdout.startswith("Spark did not start: ") and "a lot" in done.stdout
