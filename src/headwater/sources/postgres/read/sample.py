"""A sample of a table's rows: random pages, and some of their rows at even intervals. Never a scan by OFFSET."""

from __future__ import annotations

from collections.abc import Callable, Collection

from headwater.errors import NotSupported
from headwater.model.table import Table
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.schema.table_shapes import Shape, Shapes, hold, ident
from headwater.sources.read import Sample, SamplePoint

ROW_BYTES = 8  # overhead of a row besides its values
ALL_ROWS = "SET LOCAL row_security = off"  # PostgreSQL then refuses the read if a policy would hide rows
SEED = 1  # fixed, so that a table gives nearly the same sample each time
SURE = 4  # factor of rows drawn over rows asked for, because pages are filled unevenly

_SIZE = """
WITH leaf AS (
  SELECT c.reltuples, c.relpages, pg_relation_size(c.oid) / current_setting('block_size')::int AS pages
  FROM pg_class c
  WHERE c.oid IN (SELECT $1::oid UNION SELECT relid FROM pg_partition_tree($1::oid) WHERE isleaf) AND c.relkind = 'r')
SELECT coalesce(sum(pages), 0)::bigint,
  CASE WHEN bool_and(relpages > 0 OR pages = 0)
    THEN sum(reltuples / nullif(relpages, 0) * pages)::bigint ELSE -1 END
FROM leaf
"""

Drawn = list[tuple[object, ...]]  # keys, then the bytes of the values


def read_sample(
    pool: Pool, shapes: Shapes, name: str, size: int, odd: Callable[[], Collection[str]] = lambda: ()
) -> Sample:
    """Return estimates of table `name` from about `size` of its rows, from all if it has fewer."""

    def read(link: Link) -> tuple[Table, Drawn, int]:
        link.script(ALL_ROWS)
        hold(link, name)
        shape = shapes.shape(link, name)
        return (shape.table, *_drawn(link, shape, max(size, 1)))

    return _weighed(*pool.read(read), odd())


def _drawn(link: Link, shape: Shape, size: int) -> tuple[Drawn, int]:
    """Return keys and sizes of sampled rows, and the approximate number of all rows."""
    # Columns are renamed because `n` is ours. Large values are read only for the rows that are taken.
    columns = ", ".join(f"{ident(name)} AS c{place}" for place, name in enumerate(shape.table.names))
    keys = [f"c{shape.place(name)}" for name in shape.table.key]
    # The size of a row on the wire is that of its text.
    lengths = " + ".join(f"coalesce(octet_length(c{place}::text), 0)" for place in range(len(shape.table.names))) or "0"
    select = f"SELECT {', '.join([*keys, lengths])} FROM (SELECT row_number() OVER () AS n, {columns} FROM {shape.own}"
    some = link.run(f"{select} LIMIT {size + 1}) every_one").values()
    if len(some) <= size:
        return some, len(some)
    ((pages, rows),) = link.run(_SIZE, [str(shape.oid).encode()]).values()
    pages = max(pages, 1)
    part = min(SURE * size / pages, 1.0)  # of the pages
    ((estimate,),) = [(rows,)] if rows and rows > 0 else link.run(_count(shape, part)).values()
    estimate = max(estimate, len(some))
    wanted = min(size / (estimate * part), 1.0)  # of the rows of those pages
    pages_of = f" TABLESAMPLE SYSTEM ({100 * part}) REPEATABLE ({SEED})) every_one"
    every = f"WHERE floor(n * {wanted}::float8) > floor((n - 1) * {wanted}::float8) LIMIT {2 * size}"
    return link.run(f"{select}{pages_of} {every}").values() or some[:size], estimate


def _count(shape: Shape, part: float) -> str:
    """Return the SQL that estimates the number of rows, for a table that PostgreSQL has never analysed."""
    drawn = f"{shape.own} TABLESAMPLE SYSTEM ({100 * part}) REPEATABLE ({SEED})"
    return f"SELECT round(count(*) / {part})::bigint FROM {drawn}"


def _weighed(table: Table, drawn: Drawn, rows: int, odd: Collection[str]) -> Sample:
    width = len(table.key)
    each = rows / len(drawn) if drawn else 0.0
    weights = [(each, each * (ROW_BYTES + int(str(row[width])))) for row in drawn]
    total = round(sum(weight for _, weight in weights))
    try:
        place = order(table, table.key, odd) if table.key else None
    except NotSupported:
        place = None
    if place is None:  # the keys have no order here
        return Sample(table, rows, total)
    points = (SamplePoint(place(row[:width]), *weight) for row, weight in zip(drawn, weights, strict=True))  # type: ignore[arg-type]
    return Sample(table, rows, total, tuple(sorted(points, key=lambda point: point.place)))
