"""Merges with delta-rs: collecting the rows of a step, merging them in one commit, and translating the errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from headwater.errors import HeadwaterError, Unavailable
from headwater.model.table import Table
from headwater.pipeline.failure import cause_of
from headwater.pipeline.sinks.delta.layout import SOURCE, TARGET, Merge
from headwater.pipeline.sinks.delta.part import committing
from headwater.pipeline.transform.compaction import quoted, unused_name
from headwater.pipeline.transform.schema import changes_schema, struct_of
from headwater.pipeline.transform.unchanged_columns import UNKNOWN, kept

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

TRIES = 20  # attempts against other writers of the table, such as OPTIMIZE; each attempt repeats all its work


class TooLarge(Exception):
    """The rows of a step do not fit into the driver."""


def collect(source: DataFrame) -> pa.Table:
    try:
        return source.toArrow()
    except Exception as error:
        if "spark.driver.maxResultSize" in str(error):
            raise TooLarge from None
        raise


def merge_rows(held: DeltaTable, rows: pa.Table, merge: Merge, app: str | None, number: int) -> None:
    merger = held.merge(
        rows,
        merge.on,
        SOURCE,
        TARGET,
        streamed_exec=False,  # otherwise delta-rs does not prune files by key
        commit_properties=committing(app, number),
    )
    if merge.delete_if:
        merger = merger.when_matched_delete(merge.delete_if)
    merger.when_matched_update(merge.update, merge.update_if).when_not_matched_insert(
        merge.insert, merge.insert_if
    ).execute()


def keeping(rows: pa.Table, merge: Merge) -> tuple[pa.Table, Merge]:
    """Return rows and a merge that keeps the target's value wherever `_misfit` marks a value as unchanged."""
    import pyarrow as pa
    import pyarrow.compute as pc

    misfit = rows.schema.names[-7]  # the column before the five of a change and the delete flag
    if not pc.any(pc.match_substring(rows[misfit], UNKNOWN)).as_py():
        return rows, merge
    gone = rows.column(rows.num_columns - 1).to_pylist()
    told = [kept(None if is_gone else text) for text, is_gone in zip(rows[misfit].to_pylist(), gone, strict=True)]
    rows = rows.set_column(
        rows.schema.get_field_index(misfit), misfit, pa.array([rest for _, rest in told], pa.string())
    )
    update = dict(merge.update)
    for number, name in enumerate(sorted(frozenset[str]().union(*(names for names, _ in told)))):
        flag = unused_name(f"_kept{number}", rows.schema.names)
        rows = rows.append_column(flag, pa.array([name in names for names, _ in told], pa.bool_()))
        here, there = f"{TARGET}.{quoted(name)}", f"{SOURCE}.{quoted(name)}"
        update[quoted(name)] = f"CASE WHEN {SOURCE}.{quoted(flag)} THEN {here} ELSE {there} END"
    return rows, msgspec.structs.replace(merge, update=update)


def filled(frame: DataFrame, table: Table, types: str) -> DataFrame:
    """Return `frame` with all columns of changes of `table`; columns that `frame` lacks are null."""
    from pyspark.sql import functions as f

    wanted = struct_of(changes_schema(table, types=types))
    there = set(frame.columns)
    return frame.select(
        *[
            f.col(quoted(field.name)) if field.name in there else f.lit(None).cast(field.dataType).alias(field.name)
            for field in wanted.fields
        ]
    )


def tries() -> Iterator[int]:
    yield from range(TRIES)
    raise Unavailable(f"other writers changed the table in the lake {TRIES} times in a row", hint="Try again.")


@contextmanager
def ours() -> Iterator[None]:
    """Turn errors of delta-rs and Spark into Headwater errors."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except HeadwaterError:
        raise
    except ConnectionError as error:  # raised by Python sockets, and only those to Java are used here
        raise cause_of(error) from error
    except (DeltaError, OSError) as error:
        raise Unavailable(f"the write to the lake failed: {str(error).splitlines()[0]}") from error
    except Exception as error:
        raise cause_of(error) from error
