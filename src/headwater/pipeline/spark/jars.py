"""Jars that pyspark does not include: Delta and Kafka, from a local folder, otherwise from Maven by Spark itself.

`python -m headwater.pipeline.spark.jars FOLDER` fills the folder by Maven; `make jars` does so for this checkout.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from headwater.errors import ConfigError, PipelineError
from headwater.model.suggestion import nearest

FOLDER = Path(".jars")
DELTA, KAFKA = "delta", "kafka"
JDBC = "jdbc"  # PostgreSQL's driver, which no sink needs: for comparisons
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_PATIENCE_SECONDS = 600.0


class Package(NamedTuple):
    """A Maven artifact, built for the Spark and Scala versions of pyspark 4.2."""

    group: str
    artifact: str
    version: str

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


PACKAGES = {
    # The Python package is one version ahead: 4.4.1 was not published to Maven.
    DELTA: Package("io.delta", "delta-spark_4.2_2.13", "4.4.0"),
    KAFKA: Package("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    JDBC: Package("org.postgresql", "postgresql", "42.7.4"),
}

# Some mirrors of Maven Central lack a jar in the right version. This older jar replaces it, and its code does not
# run (the token provider is for Kerberos only).
STAND_INS = {KAFKA: Package("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0")}
# Without these settings Spark loads the jar and does not use it.
_SETTINGS = {
    DELTA: {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
}


def have_jars(kind: str, folder: Path = FOLDER) -> bool:
    """Return whether `folder` holds the jars of `kind`."""
    return _jar_folder(kind, folder).is_dir()


def jar_settings(kinds: Iterable[str], folder: Path = FOLDER) -> dict[str, str]:
    """Return the Spark settings for `kinds`: files of the folder, and Maven names for jars that are not there."""
    files: list[str] = []
    names: list[str] = []
    settings: dict[str, str] = {}
    for kind in sorted(set(kinds)):
        settings |= _SETTINGS.get(kind, {})
        if have_jars(kind, folder):
            files += [str(jar.resolve()) for jar in sorted(_jar_folder(kind, folder).glob("*.jar"))]
        else:
            names.append(str(PACKAGES[kind]))
    told = {"spark.jars": ",".join(files), "spark.jars.packages": ",".join(names)}
    return settings | {name: value for name, value in told.items() if value}


def fetch_jars(kind: str, folder: Path = FOLDER) -> None:
    """Fetch the jars of `kind` into `folder` by Maven if they are missing; raise PipelineError if that fails."""
    if have_jars(kind, folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Maven needs an absolute path: it resolves relative paths against the folder of the pom.
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix=".fetching-") as work:
        found = Path(work) / "found"
        try:
            _copy([PACKAGES[kind]], Path(work) / "pom.xml", found)
        except PipelineError:
            if kind not in STAND_INS:
                raise
            _copy([PACKAGES[kind], STAND_INS[kind]], Path(work) / "pom.xml", found)
        for jar in found.glob("*.jar"):
            if _artifact(jar) in _bundled():
                jar.unlink()
        found.rename(_jar_folder(kind, folder))


def _jar_folder(kind: str, folder: Path) -> Path:
    if kind not in PACKAGES:
        raise ConfigError(f"there are no jars called {kind!r}", hint=nearest(kind, PACKAGES))
    return folder / f"{kind}-{PACKAGES[kind].version}"


# Spark's pom sends Maven to a mirror of Central first; under the mirror's name the pom lists Central itself, which
# every proxy knows.
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>headwater</groupId><artifactId>jars</artifactId><version>1</version>
<repositories><repository><id>gcs-maven-central-mirror</id>
<url>https://repo.maven.apache.org/maven2</url></repository></repositories>
<dependencies>{}</dependencies></project>
"""
_DEPENDENCY = (
    "<dependency><groupId>{0.group}</groupId><artifactId>{0.artifact}</artifactId>"
    "<version>{0.version}</version></dependency>"
)


def _copy(packages: list[Package], pom: Path, target: Path) -> None:
    """Copy the first package with its dependencies; the other packages only determine versions."""
    mvn = shutil.which("mvn")
    if mvn is None:
        raise PipelineError("mvn is not installed", hint="Install it (Debian, Ubuntu: apt-get install maven).")
    pom.write_text(_POM.format("".join(map(_DEPENDENCY.format, packages))))
    command = [mvn, "-q", "-B", "-f", str(pom), _COPY, f"-DoutputDirectory={target}", "-DincludeScope=runtime"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise PipelineError(f"Maven did not answer within {_PATIENCE_SECONDS:.0f} s") from None
    if done.returncode or not any(target.glob(f"{packages[0].artifact}-*.jar")):
        raise PipelineError(f"Maven could not fetch {packages[0]}: {_reason(done.stdout)}")


def _reason(output: str) -> str:
    found = re.search(r"\[ERROR\] (?:Failed to execute goal [^:]*: )?(\S.*?)(?: -> \[Help|$)", output, re.MULTILINE)
    return found[1] if found else "it says no reason"


def _artifact(jar: Path) -> str:
    """Return the file name without the version: Spark's own copy of an artifact must win."""
    return re.sub(r"-\d.*", "", jar.stem)


def _bundled() -> set[str]:
    import pyspark

    return {_artifact(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}


def main(folder: Path) -> None:
    """Fetch the jars of the sinks and print one line; a failure of Maven is printed, not raised."""
    said = []
    for kind in (DELTA, KAFKA):
        try:
            fetch_jars(kind, folder)
            said.append(f"{kind} {PACKAGES[kind].version}")
        except PipelineError as error:
            said.append(f"no {kind} ({error.message}; tests that need it are skipped)")
    print(f"jars in {folder}: {', '.join(said)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
