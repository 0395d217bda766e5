"""The form of decimals, dates and timestamps in a sink: chosen by `types` for a new one, kept until a reset."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import msgspec
import pytest
from tests.conformance.live_server import Live
from tests.pipeline.lakes import DELTA, Lake, Watching

from headwater.model.table import Column, Table
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.sinks.sink import Plan

COLUMNS = "id INTEGER PRIMARY KEY, price DECIMAL(10,2), day DATE, at DATETIME, note DECIMAL_TEXT(5,1)"
FIRST = "(1, 12.30, '2026-01-31', '2026-01-31 10:00:00', '1.5')"
ODD = "(2, 'no number', '2026-02-30', '2026-01-31T10:00:00Z', '1.25')"
SQL = 'kind = "sql"\ntable = "t"\nurl = "sqlite:///{path}"'


def test_plan_from_before_the_setting_is_of_the_text_form() -> None:
    plan = Plan("p", "g", 1, (), Table("t", (Column("id", "i64"),), ("id",)), types="typed")
    stored = msgspec.json.decode(msgspec.json.encode(plan))
    assert msgspec.convert(stored, Plan).types == "typed"
    del stored["types"]
    assert msgspec.convert(stored, Plan).types == "text"


def reset(lake: Lake) -> None:
    with MetaStore.open(str(lake.folder / "headwater-pipeline.db")) as meta:
        assert meta.reset("lake") == 1


def test_values_of_sqlite_that_do_not_fit_their_declared_type_are_misfits(lake: Lake, server: Live) -> None:
    server.sql(f"CREATE TABLE t ({COLUMNS})")
    server.sql(f"INSERT INTO t VALUES {FIRST}, {ODD}")
    lake.carry()
    server.sql("INSERT INTO t SELECT id + 10, price, day, at, note FROM t")  # the same values by the log
    lake.carry()
    first, odd, *again = sorted(lake.rows(), key=lambda row: int(row["id"]))
    at = datetime(2026, 1, 31, 10)
    assert first == {
        "id": 1,
        "price": Decimal("12.30"),
        "day": date(2026, 1, 31),
        "at": at,
        "note": Decimal("1.5"),
        "_misfit": None,
    }
    assert [odd[name] for name in ("price", "day", "at", "note")] == [None] * 4
    assert msgspec.json.decode(odd["_misfit"]) == {
        "price": {"t": "json", "v": "no number"},
        "day": {"t": "date", "iso": "2026-02-30"},
        "at": {"t": "datetime", "iso": "2026-01-31T10:00:00Z"},
        "note": {"t": "dec", "v": "1.25"},
    }
    assert again == [first | {"id": 11}, odd | {"id": 12}]
    assert lake.verify().is_good and lake.is_equal()


@pytest.mark.parametrize("kind", ["delta", "sql"])
def test_sink_keeps_its_form_until_a_reset(kind: str, lake: Lake, server: Live) -> None:
    server.sql(f"CREATE TABLE t ({COLUMNS})")
    server.sql(f"INSERT INTO t VALUES {FIRST}")
    sink = DELTA if kind == "delta" else SQL.format(path=lake.folder / "t.sqlite")
    text, typed = lake.spec(t='types = "text"', sink=sink), lake.spec(sink=sink)
    lake.carry(text)
    for number, spec in enumerate((text, typed, typed), 10):
        server.sql(f"INSERT INTO t VALUES ({number}, 1.5, '2026-01-01', '2026-01-01 00:00:00', '0.5')")
        if number == 12:
            server.sql("ALTER TABLE t ADD COLUMN due DATE DEFAULT '2026-01-01'")  # no change tells that of each row
        watcher = Watching()
        lake.carry(spec, watcher)
        assert watcher.reasons == (["schema_changed"] if number == 12 else [])
        assert lake.verify(spec).is_good
        assert kind == "sql" or lake.rows() == lake.source(types="text")
    for spec, form in ((typed, "typed"), (text, "text")):
        reset(lake)
        lake.carry(spec)
        assert lake.verify(spec).is_good
        if kind == "delta":
            assert lake.rows() == lake.source(types=form)
