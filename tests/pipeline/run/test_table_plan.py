"""The columns and rows of a table that are carried, and the refusal of a sink that holds others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headwater.errors import PipelineError, SchemaChanged, SinkUnfit
from headwater.model.keys.key import Span
from headwater.model.table import Column, Table
from headwater.pipeline.run.spec import PipelineSpec, SinkSpec, TableSpec
from headwater.pipeline.run.table_plan import carried_table, check_choice, check_origin
from headwater.pipeline.sinks.sink import Plan

COLUMNS = tuple(Column(name, "i64") for name in ("id", "a", "b"))
TABLE = Table("orders", COLUMNS, ("id",), version=3)
SPEC = TableSpec("orders", SinkSpec("delta"))
PIPELINE = PipelineSpec((SPEC,), name="lake")
PLAN = Plan("p", "g", 1, (Span.all(),), TABLE, db="main", pipeline="lake")


def names(table: Table) -> tuple[str, ...]:
    return table.names


def test_chosen_columns_include_the_key() -> None:
    assert carried_table(SPEC, TABLE) is TABLE
    assert names(carried_table(TableSpec("orders", SPEC.sink, columns=("b",)), TABLE)) == ("id", "b")


def test_pinned_columns_are_those_of_the_sink_and_a_dropped_column_is_refused() -> None:
    pinned = TableSpec("orders", SPEC.sink, schema="pin")
    wider = replace(TABLE, columns=(*COLUMNS, Column("c", "str")), version=4)
    assert names(carried_table(pinned, wider, TABLE)) == ("id", "a", "b")
    with pytest.raises(SchemaChanged, match="'b'"):
        carried_table(pinned, replace(TABLE, columns=COLUMNS[:2]), TABLE)
    assert names(carried_table(pinned, wider)) == ("id", "a", "b", "c"), "the first snapshot pins what there is"


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, db="other"),
        replace(PLAN, pipeline="another"),
        replace(PLAN, table=replace(TABLE, name="customers")),
    ],
)
def test_sink_of_another_table_or_pipeline_is_refused(plan: Plan) -> None:
    check_origin(PLAN, PIPELINE, SPEC)
    with pytest.raises(SinkUnfit, match="not main.orders of pipeline 'lake'"):
        check_origin(plan, PIPELINE, SPEC)


def test_changed_filter_or_columns_of_a_pipeline_are_refused() -> None:
    check_choice(PLAN, SPEC)
    with pytest.raises(PipelineError, match="where"):
        check_choice(replace(PLAN, where="a > 1"), SPEC)
    with pytest.raises(PipelineError, match="columns"):
        check_choice(PLAN, TableSpec("orders", SPEC.sink, columns=("b",)))
