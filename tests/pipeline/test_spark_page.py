"""The examples of docs/spark.md and docs/pipeline.md run, in order, and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conformance.live_server import Live
from tests.doc_pages import BLOCK, blocks, page

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ADDRESS = "http://127.0.0.1:7171"
PATIENCE = 300.0  # of a command that starts a Spark of its own, on a busy machine


def first_minutes() -> str:
    return page("docs/pipeline.md").split("## The first five minutes")[1].split("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for _, body in blocks(text, "sh") for line in body.splitlines()]


@pytest.mark.usefixtures("own_catalog")
def test_spark_page_examples_print_the_documented_output(spark: SparkSession, server: Live, tmp_path: Path) -> None:
    for command in commands(first_minutes()):
        if command[0] == "sql" and not command[1].startswith("UPDATE"):
            server.sql(command[1])
    names: dict[str, Any] = {}
    printed: str | None = None
    ran = 0
    try:
        for kind, body in BLOCK.findall(page("docs/spark.md")):
            if kind == "python":
                assert not printed, f"the page does not show {printed!r}"
                real = body.replace(ADDRESS, server.url).replace("/srv/lake", str(tmp_path))
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(real, "spark.md", "exec"), names)
                printed = out.getvalue()
                ran += 1
            elif kind == "text":
                assert body == printed
                printed = None
    finally:
        spark.sql("DROP TABLE IF EXISTS shop_orders")
        if "client" in names:
            names["client"].close()
    assert ran > 8 and not printed


@pytest.mark.soak(seconds=70, every_time=True)
@pytest.mark.spark
def test_pipeline_page_commands_produce_a_verified_lake(server: Live, tmp_path: Path) -> None:
    """The commands of the page in separate processes; then its ten lines of Python."""
    ((_, shown),) = blocks(first_minutes(), "text")
    said = []
    for command in commands(first_minutes()):
        match command:
            case ["serve"]:
                continue
            case ["sql", *rest]:
                said.append(ran(tmp_path, "-m", "headwater", "sql", "--server", server.url, *rest))
            case ["pipeline", "init", *_]:
                said.append(ran(tmp_path, "-m", "headwater", *command))
                file = tmp_path / "lake.toml"
                file.write_text(file.read_text().replace(ADDRESS, server.url))
            case _:
                said.append(ran(tmp_path, "-m", "headwater", *command))
    first, second, status = (text for text in said if "main.orders" in text)
    assert first.endswith(shown)
    assert "source and sink are equal: 3 rows in 1 range at offset 5" in second
    assert " ".join(status.splitlines()[1].split()) == "lake main.orders stopped log 1/1 3 5 0 at 5"
    section = page("docs/pipeline.md").split("## The same in Python")[1].split("\n## ")[0]
    ((_, program),), ((_, printed),) = blocks(section, "python"), blocks(section, "text")
    (tmp_path / "program.py").write_text(program.replace(ADDRESS, server.url))
    assert ran(tmp_path, "program.py") == printed


def ran(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout
