"""A real Kafka broker for tests: KRaft mode, one node, from Maven's jars. (PYTEST_DONT_REWRITE)"""

import functools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

from tests.pipeline.servers import start, wait_for

from headwater.pipeline.spark.java import find_java

VERSION = "3.9.1"
ROOT = Path(__file__).parent.parent.parent
JARS = ROOT / ".jars" / f"kafka-broker-{VERSION}"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>headwater</groupId><artifactId>broker</artifactId><version>1</version>
<dependencies><dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{VERSION}</version></dependency></dependencies></project>
"""
_PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/data
num.partitions=3
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


@functools.cache
def no_broker() -> str:
    """Return why no broker can run here, after an attempt to fetch its jars; "" if it can."""
    if JARS.is_dir():
        return ""
    mvn = shutil.which("mvn")
    if mvn is None:
        return "Kafka is missing: its jars come by Maven (Debian, Ubuntu: apt-get install maven)"
    JARS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=JARS.parent, prefix=".fetching-") as work:
        pom, found = Path(work) / "pom.xml", Path(work) / "found"
        pom.write_text(_POM)
        command = [mvn, "-q", "-B", "-f", str(pom), _COPY, f"-DoutputDirectory={found}", "-DincludeScope=runtime"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            return f"Kafka is missing: Maven could not fetch its jars: {done.stdout.strip()[:200]}"
        if not JARS.is_dir():  # another process may have been faster
            found.rename(JARS)
    return ""


@functools.cache
def start_broker() -> str:
    """Start this process's broker, once; return its address."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-kafka-"))
    port, controller = _free_ports(2)
    settings = folder / "server.properties"
    settings.write_text(_PROPERTIES.format(port=port, controller=controller, folder=folder))
    java = [str(find_java().home / "bin" / "java"), "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    java += ["-cp", f"{JARS}/*"]
    identity = uuid.uuid4().hex[:22]
    formatting = [*java, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(settings)]
    subprocess.run(formatting, check=True, capture_output=True)
    process = start([*java, "kafka.Kafka", str(settings)], folder / "log")
    wait_for(lambda: _answers(port), process, folder / "log")
    return f"127.0.0.1:{port}"


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _answers(port: int) -> bool:
    """Return whether the port answers a request for API versions (key 18, version 0)."""
    with socket.socket() as probe:
        probe.settimeout(2)
        try:
            probe.connect(("127.0.0.1", port))
            body = b"\x00\x12\x00\x00\x00\x00\x00\x01\x00\x04test"
            probe.sendall(len(body).to_bytes(4, "big") + body)
            return bool(probe.recv(4))
        except OSError:
            return False


if __name__ == "__main__":
    print(no_broker() or start_broker(), os.getpid())


Line = tuple[int, Any, Any]  # partition, key, value


def lines_of(broker: str, topic: str) -> list[Line]:
    """Return every message of the topic, by partition and offset."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": broker, "group.id": "test", "enable.auto.commit": False})
    try:
        found = []
        for partition in consumer.list_topics(topic, 30).topics[topic].partitions:
            _, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), 30)
            consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
            while high:
                (one,) = consumer.consume(1, 30)
                assert one.error() is None
                value = one.value()
                found.append((partition, json.loads(one.key()), None if value is None else json.loads(value)))
                high = 0 if one.offset() + 1 >= high else high
        return found
    finally:
        consumer.close()
