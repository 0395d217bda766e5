"""The Kafka sink on a real broker: keys of messages, their order, and repeats."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from pyspark.sql import SparkSession
from tests.pipeline.kafka_broker import Line, lines_of, no_broker, start_broker
from tests.pipeline.sinks.sql_parquet_foreach_targets import Book
from tests.pipeline.table_model import SPANS, TABLE, Story, row

from headwater.errors import ConfigError, SinkFenced
from headwater.pipeline.sinks.envelope import Envelope
from headwater.pipeline.sinks.kafka import KafkaSink, open_kafka
from headwater.pipeline.sinks.registry import is_exactly_once, read_settings
from headwater.pipeline.sinks.sink import PLAIN, Part
from headwater.pipeline.spark.jars import FOLDER, KAFKA, have_jars

JARS = Path(__file__).parents[3] / FOLDER


@pytest.fixture(scope="module")
def broker() -> str:
    """Return the address of a broker; skip the test, on CI too, if Maven cannot fetch its jars."""
    if not have_jars(KAFKA, JARS):
        pytest.skip("no Kafka jars for Spark here; `make jars` fetches them")
    reason = no_broker()
    if reason:
        pytest.skip(reason)
    return start_broker()


_topics = iter(range(1000))


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_topics)}"


def by_key(lines: list[Line]) -> dict[int, list[Any]]:
    made: dict[int, list[Any]] = {}
    for _, key, value in lines:
        made.setdefault(key["id"], []).append(value)
    return made


@pytest.fixture
def story() -> Story:
    told = Story()
    for key in (1, 2, 100):
        told.insert(row(key, f"n{key}", big=2**64 - 1, data=b"\x00\xff"))
    return told


@pytest.fixture
def changed(story: Story) -> Iterator[Story]:
    """Yield the story after an update, a change of key, a delete, and ten updates of one key."""
    story.update(1, row(1, "one"))
    story.update(2, row(20, "moved"))
    story.delete(100)
    for number in range(10):
        story.update(1, row(1, f"v{number}"))
    yield story


def test_kafka_messages_are_keyed_and_keep_the_order_of_each_key(
    spark: SparkSession, broker: str, topic: str, story: Story, changed: Story
) -> None:
    needs: Any = SimpleNamespace(name="lake/shop/t", ledger=Book())
    sink = open_kafka({"servers": broker, "topic": topic}, needs)
    assert (sink.name, is_exactly_once("kafka")) == (f"kafka {broker} {topic}", False)
    plan, parts = replace(story.plan("p"), offset=3), [Part(span, 3) for span in SPANS]
    sink.begin(plan)
    sink.load(story.loading(spark, parts), plan, parts)
    sink.apply(story.changes(spark, 3, story.offset), story.step(plan, 3, story.offset), TABLE)
    state = sink.state()
    assert state and state.offset == story.offset
    lines = lines_of(broker, topic)
    assert len({(partition, key["id"]) for partition, key, _ in lines}) == len(by_key(lines))
    told = {key: [(value["op"], value["offset"]) for value in values] for key, values in by_key(lines).items()}
    assert told == {
        1: [("snapshot", 3), ("update", 4), *(("update", offset) for offset in range(7, 17))],
        2: [("snapshot", 3), ("delete", 5)],
        20: [("insert", 5)],
        100: [("snapshot", 3), ("delete", 6)],
    }
    first, update = by_key(lines)[1][:2]
    assert (first["before"], first["after"]["big"], first["after"]["data"]) == (None, 2**64 - 1, "AP8=")
    assert (update["before"]["name"], update["after"]["name"], update["table"], update["txn"]) == (
        "n1",
        "one",
        "t",
        "t4",
    )
    assert update["ts_ms"] == (1_800_000_000 + 4) * 1000 and "_misfit" not in update["after"]


def test_debezium_messages_have_its_fields_and_deletes_are_followed_by_a_tombstone(
    spark: SparkSession, broker: str, topic: str, story: Story, changed: Story
) -> None:
    settings = {"servers": broker, "topic": topic, "format": "debezium", "tombstones": True}
    needs: Any = SimpleNamespace(name="lake/shop/t", ledger=Book())
    sink = open_kafka(settings, needs)
    plan = replace(story.plan("p", spans=()), offset=3)  # no rows to load first
    sink.begin(plan)
    sink.apply(story.changes(spark, 3, 6), story.step(plan, 3, 6), TABLE)
    found = by_key(lines_of(broker, topic))
    assert {key: [value and value["op"] for value in values] for key, values in found.items()} == {
        1: ["u"],
        2: ["d", None],
        20: ["c"],
        100: ["d", None],
    }
    (update,) = found[1]
    source = {name: update["source"][name] for name in ("connector", "name", "db", "table", "txId", "lsn", "snapshot")}
    assert source == {
        "connector": "headwater",
        "name": "shop",
        "db": "shop",
        "table": "t",
        "txId": "t4",
        "lsn": 4,
        "snapshot": "false",
    }
    assert update["source"]["sequence"] == '[null,"4"]' and update["transaction"] == {"id": "t4"}
    assert (update["before"]["name"], update["after"]["name"], update["ts_ms"]) == ("n1", "one", 1_800_000_004_000)


def test_rows_sent_before_a_crash_are_sent_again_and_none_is_lost(
    spark: SparkSession, broker: str, topic: str, story: Story
) -> None:
    book = Book()
    sink = KafkaSink("kafka", book, Envelope(PLAIN, "shop"), {"kafka.bootstrap.servers": broker, "topic": topic})
    plan = story.plan("p")
    sink.begin(plan)
    before = book.state
    parts = [Part(span, 3) for span in SPANS]
    sink.load(story.loading(spark, parts), plan, parts)
    book.state = before  # killed after the rows were sent, before the ledger was
    sink.load(story.loading(spark, parts), plan, parts)
    assert {key: len(values) for key, values in by_key(lines_of(broker, topic)).items()} == {1: 2, 2: 2, 100: 2}
    sink.load(story.loading(spark, parts), plan, parts)
    assert len(lines_of(broker, topic)) == 6
    sink.begin(story.plan("q"))
    with pytest.raises(SinkFenced):
        sink.load(story.loading(spark, parts), plan, parts)


@pytest.mark.parametrize(
    "settings",
    [
        {"servers": "x:1"},
        {"topic": "t"},
        {"servers": "x:1", "topic": "t", "format": "avro"},
        {"servers": "x:1", "topic": "t", "topics": "u"},
        {"servers": "x:1", "topic": "t", "tombstones": "yes"},
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_settings("kafka", settings)


def test_kafka_sink_hides_secrets_of_its_options() -> None:
    sink = open_kafka(
        {"servers": "x:1", "topic": "t", "options": {"kafka.sasl.jaas.config": "s3cret"}},
        SimpleNamespace(name="t", ledger=Book()),  # type: ignore[arg-type]
    )
    assert "s3cret" not in f"{sink!r} {sink.name}"
