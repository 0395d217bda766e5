"""One Spark session for the whole run, started by the first test that needs it, and servers for it to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conformance.live_server import Live
from tests.pipeline.fake_pull_server import Twin
from tests.pipeline.lakes import Lake

from headwater.pipeline.spark.frames import register
from headwater.pipeline.spark.jars import DELTA, FOLDER, KAFKA, have_jars
from headwater.pipeline.spark.session import close_session, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
CONF = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",  # a tenth of the time, for tables of a few rows
    "spark.sql.codegen.wholeStage": "false",  # compiling a plan takes longer than running it on a few rows
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,  # a tenth of a second less for each batch
}
SERVED = {"test_sql_sink.py", "test_progress.py"}  # they start database servers
ROOT = Path(__file__).parent.parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use Spark as slow, to run in one process, so that there is one JVM on the machine.

    The contract of sinks that are not embedded is for `make soak`, but for the tests that run on every sink. Those of
    delta-spark-history take six seconds each and run in every slice of CI: `make test` has them on delta-spark-upsert,
    which merges by the same sink, and on delta-history.
    """
    for item in items:
        factory = getattr(item, "callspec", None) and item.callspec.params.get("factory")
        if factory and not factory.is_embedded and not item.get_closest_marker("every_sink"):
            item.add_marker(pytest.mark.soak(seconds=5))
        elif factory and factory.name == "delta-spark-history":
            item.add_marker(pytest.mark.soak(seconds=6, every_time=True))
        if item.path.name in SERVED:
            item.add_marker(pytest.mark.slow)
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Yield a session that knows the format `headwater`, with the jars that `make jars` fetched."""
    folder = ROOT / FOLDER
    jars = [kind for kind in (DELTA, KAFKA) if have_jars(kind, folder)]
    conf = CONF | {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    session = open_session(name="tests", jars=jars, jars_folder=folder, conf=conf, short_lived=True)
    register(session)
    yield session
    close_session(session)


@pytest.fixture
def own_catalog(spark: SparkSession) -> Iterator[None]:
    """Use Spark's own catalog during the test: the jars of Delta replace it, and have no tables of Python sources."""
    name = "spark.sql.catalog.spark_catalog"
    given = spark.conf.get(name, "builtin")
    spark.conf.set(name, "builtin")
    yield
    spark.conf.set(name, str(given))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    """Yield a whole Headwater; `server.sql(…)` writes to its database."""
    live = Live(tmp_path / "data")
    yield live
    live.stop()


@pytest.fixture
def twin() -> Iterator[Twin]:
    """Yield a fake pull server that the test controls."""
    made = Twin()
    yield made
    made.close()


@pytest.fixture
def lake(spark: SparkSession, server: Live, tmp_path: Path) -> Lake:
    """Return a pipeline of that server into a folder."""
    return Lake(spark, server, tmp_path)
