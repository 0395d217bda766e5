"""The Spark session: started without console output, on a Java that was found, with workers of this Python."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError, PipelineError
from headwater.pipeline.failure import GONE, JAVA, is_gone
from headwater.pipeline.spark.jars import FOLDER, jar_settings
from headwater.pipeline.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",  # for small tables; callers set the number for large tables
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.scheduler.mode": "FAIR",  # a long snapshot of one table leaves cores to the steps of others
}
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.python.daemon.module": "headwater.pipeline.spark.worker_daemon",
}
# Halves the start-up time, but is slower later: the JVM never uses its optimizing compiler.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"

# Loggers of pyspark that print each exception again, as JSON.
_LOUD = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")

# Spark logs to Java's stderr, which is redirected to a file.
_LOG4J = """rootLogger.level = error
rootLogger.appenderRef.file.ref = file
appender.file.type = Console
appender.file.name = file
appender.file.target = SYSTEM_ERR
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""

_TELLS_NOTHING = ("at ", "Error: Could not create the Java Virtual Machine", "Error: A fatal exception has occurred")

_opening = threading.Lock()


def open_session(
    master: str = "local[2]",
    name: str = "headwater",
    *,
    jars: Iterable[str] = (),
    conf: Mapping[str, str] | None = None,
    jars_folder: Path = FOLDER,
    short_lived: bool = False,
) -> SparkSession:
    """Return the active session, or a new one with these settings; `jars` are kinds of pipeline/spark/jars.py.

    `short_lived` starts in half the time and is slower after the first minute: for tests and demonstrations.
    """
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ImportError:
        raise PipelineError("pyspark is not installed", hint="pip install 'headwater[spark]'") from None
    with _opening:
        if SparkSession.getActiveSession() is None:
            settings = _settings(master, name, jars, conf or {}, jars_folder, short_lived)
            open_ = SparkConf(loadDefaults=False)
            open_.setAll([(key, value) for key, value in settings.items() if key not in (conf or {})])
            with _properties({key: settings[key] for key in conf or {}}):
                _start_java(open_, master)
        return SparkSession.builder.appName(name).getOrCreate()


def close_session(session: SparkSession) -> None:
    """Stop the session and its Java process, so that another session may be opened."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway: Any = SparkContext._gateway
    is_alive = gateway is None or gateway.proc is None or gateway.proc.poll() is None
    try:
        if is_alive:  # py4j would log a traceback for a Java that has ended
            session.stop()
    except Exception as error:
        if not is_gone(error):
            raise
        is_alive = False
    if not is_alive:
        SparkContext._active_spark_context = SparkSession._instantiatedSession = None
    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None
    with suppress(Exception):  # Java may have ended already
        gateway.shutdown()
    if gateway.proc is not None:
        gateway.proc.stdin.close()  # Java ends when its standard input is closed
        gateway.proc.wait()


def log_file() -> Path:
    """Return the file for the logs of Spark and its workers, which is needed only after a failure."""
    return _folder() / f"{os.getpid()}.log"


def forget_log() -> None:
    """Remove the log and the other files of this process, after a run without failures."""
    for path in (log_file(), _log4j_file()):
        path.unlink(missing_ok=True)
    shutil.rmtree(_home(), ignore_errors=True)
    with suppress(OSError):  # other processes write there, too
        _folder().rmdir()


def _settings(
    master: str, name: str, jars: Iterable[str], conf: Mapping[str, str], folder: Path, short_lived: bool
) -> dict[str, str]:
    is_local = master.startswith("local")
    given = dict(conf)
    log4j = _log4j_file()
    log4j.write_text(_LOG4J)
    options = [f"-Dlog4j2.configurationFile={log4j.as_uri()}", given.pop("spark.driver.extraJavaOptions", "")]
    options += [_SHORT_LIVED] if short_lived else []
    return {
        **_DEFAULTS,
        **(_LOCAL if is_local else {}),
        **jar_settings(jars, folder),
        "spark.master": master,
        "spark.app.name": name,
        "spark.driver.maxResultSize": _result_size(given.get("spark.driver.memory", "1g")),
        "spark.driver.extraJavaOptions": " ".join(filter(None, options)),
        **given,
    }


def _result_size(memory: str) -> str:
    """Return a quarter of the driver's heap: a collected result is in memory up to three times."""
    found = re.fullmatch(r"(\d+)([kmgt])b?", memory.strip().lower())
    mebibytes = int(found[1]) * _MEBIBYTES[found[2]] if found else 1024
    return f"{max(int(mebibytes / 4), 1)}m"


_MEBIBYTES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Return whether the root logger keeps a record: py4j logs a traceback when Java has ended, and raises as well."""
    return "py4j" not in Path(record.pathname).parts


def _start_java(settings: Any, master: str) -> None:
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.logger import PySparkLogger

    for name in _LOUD:
        PySparkLogger.getLogger(name).disabled = True
    logging.getLogger().addFilter(_is_not_of_py4j)
    if master.startswith("local") or not os.environ.get("PYSPARK_PYTHON"):
        os.environ["PYSPARK_PYTHON"] = sys.executable  # otherwise workers run the first python3 on the PATH
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(find_java().home)
    _forget_old_logs()
    with log_file().open("ab") as log, _spark_home(master), _loopback(master):
        try:
            gateway: Any = launch_gateway(  # type: ignore[no-untyped-call]
                settings, {"stdout": log, "stderr": log}
            )
        except Exception as error:
            message, hint = f"Spark did not start: {_last_line()}", f"All output: {log_file()}"
            raise PipelineError(message, hint=hint, **{JAVA: GONE}) from error
    SparkContext._ensure_initialized(gateway=gateway, conf=settings)


# Files


@contextmanager
def _spark_home(master: str) -> Iterator[None]:
    """Make Python workers on this machine import the installed pyspark instead of `pyspark.zip`.

    Spark puts the archive of SPARK_HOME first on the path of its workers. Python caches no bytecode for archives, so
    each worker compiles pyspark again: 1.5 s of CPU time instead of 0.5 for every stream that starts. SPARK_HOME is set
    to a folder that has everything of pyspark but the archive.
    """
    if "SPARK_HOME" in os.environ or not master.startswith("local"):
        yield
        return
    import pyspark

    home = _home()
    home.mkdir(exist_ok=True)
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "python" and not (home / path.name).is_symlink():
            (home / path.name).symlink_to(path)
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["SPARK_HOME"]


@contextmanager
def _loopback(master: str) -> Iterator[None]:
    """Make the Java of a local master serve Spark's UI on loopback.

    The UI has no credential, and no setting of Spark has its address.
    """
    name = "SPARK_LOCAL_IP"
    if name in os.environ or not master.startswith("local"):
        yield
        return
    os.environ[name] = "127.0.0.1"
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _properties(conf: Mapping[str, str]) -> Iterator[None]:
    """Pass `conf` in a file to the Java started inside the block, since all users can read its command line."""
    given = os.environ.get("PYSPARK_SUBMIT_ARGS")
    if not conf:
        yield
        return
    if "--properties-file" in (given or ""):
        raise ConfigError(
            "Spark reads one properties file, and PYSPARK_SUBMIT_ARGS names one", hint="Leave [pipeline.conf] empty."
        )
    number, path = tempfile.mkstemp(".properties", f"{os.getpid()}.", _folder())  # mode 0600
    try:
        with open(number, "w", encoding="ascii") as file:
            file.writelines(f"{_escaped(key)}={_escaped(value)}\n" for key, value in conf.items())
        told = f"--properties-file {shlex.quote(path)} --load-spark-defaults {given or 'pyspark-shell'}"
        os.environ["PYSPARK_SUBMIT_ARGS"] = told
        yield
    finally:
        if given is None:
            os.environ.pop("PYSPARK_SUBMIT_ARGS", None)
        else:
            os.environ["PYSPARK_SUBMIT_ARGS"] = given
        os.unlink(path)


def _escaped(text: str) -> str:
    """Return `text` escaped for a Java properties file: letters and digits unchanged, all else by number."""
    units = struct.unpack(f"<{len(text.encode('utf-16-le')) // 2}H", text.encode("utf-16-le"))
    return "".join(chr(unit) if chr(unit).isascii() and chr(unit).isalnum() else f"\\u{unit:04x}" for unit in units)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"headwater-spark-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PipelineError(
            f"{folder} belongs to another user, or others may write there", hint="Remove it, or set TMPDIR."
        )
    return folder


def _home() -> Path:
    return _folder() / f"{os.getpid()}.home"


def _log4j_file() -> Path:
    return _folder() / f"{os.getpid()}.log4j2.properties"


def _forget_old_logs() -> None:
    """Remove the files of processes that have ended."""
    for path in _folder().iterdir():
        pid = path.name.partition(".")[0]
        if not pid.isdigit() or Path("/proc", pid).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _last_line() -> str:
    """Return the last informative line of Spark's log."""
    lines = [line.strip() for line in log_file().read_text(errors="replace").splitlines()]
    told = [line for line in lines if line and not line.startswith(_TELLS_NOTHING)]
    return told[-1] if told else "it said nothing"
