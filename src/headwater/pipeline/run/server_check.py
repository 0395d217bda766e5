"""Before Spark starts: whether the server answers, and whether it has what the pipeline names."""

from __future__ import annotations

from headwater.client import Client, Described
from headwater.errors import HeadwaterError, Unavailable
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.transform.schema import rows_schema

PATIENCE_SECONDS = 3.0  # with a server that does not answer: it may just be starting
TIMEOUT_SECONDS = 5.0

Seen = Described | HeadwaterError | None


def greet(spec: PipelineSpec) -> list[Seen]:
    """Of each table what the server says: where it stands, or why not; None where only time can tell.

    Unavailable when nobody answers there.
    """
    found: list[Seen] = []
    with Client(spec.server, token_file=spec.token_file, timeout=TIMEOUT_SECONDS, patience=PATIENCE_SECONDS) as client:
        for table in spec.tables:
            try:
                found.append(client.describe(table.db, table.table))
            except HeadwaterError as error:
                if is_unreachable(error):
                    raise Unavailable(error.message, hint=hint_of(spec, "the pipeline"), **error.extra) from None
                if error.retryable:  # it answers, but not now: whoever carries the table has more patience
                    break
                found.append(error)
    return found + [None] * (len(spec.tables) - len(found))


def is_unreachable(error: HeadwaterError) -> bool:
    """Whether no connection was made. A server that is only slow, or refuses for now, is there."""
    return isinstance(error, Unavailable) and error.extra.get("sent") is False


def hint_of(spec: PipelineSpec, where: str) -> str:
    """What to look at when nobody answers."""
    return f"Is `headwater serve` running? `server` in {where} says {spec.server}"


def refusal(seen: Seen, table: TableSpec, *, is_new: bool) -> HeadwaterError | None:
    """Why `table` cannot be carried at all. Columns matter to a new sink only: others follow the table's shape."""
    if not isinstance(seen, Described):
        return seen
    try:
        if is_new:
            rows_schema(seen.table, table.columns)
    except HeadwaterError as error:
        return error
    return None
