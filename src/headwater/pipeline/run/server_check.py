"""Checks before Spark starts: whether the server answers, and whether it has the tables and columns of the pipeline."""

from __future__ import annotations

from headwater.client import Client, Described
from headwater.errors import HeadwaterError, Unavailable
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.transform.schema import rows_schema

PATIENCE_SECONDS = 3.0  # longest wait for a server that does not answer: it may be starting
TIMEOUT_SECONDS = 5.0

TableAnswer = Described | HeadwaterError | None


def describe_tables(spec: PipelineSpec) -> list[TableAnswer]:
    """Return the server's description or error of each table; None from the first table that it says to retry.

    Raise Unavailable if no server answers at the address.
    """
    found: list[TableAnswer] = []
    with Client(spec.server, token_file=spec.token_file, timeout=TIMEOUT_SECONDS, patience=PATIENCE_SECONDS) as client:
        for table in spec.tables:
            try:
                found.append(client.describe(table.db, table.table))
            except HeadwaterError as error:
                if is_unreachable(error):
                    raise Unavailable(error.message, hint=hint_of(spec, "the pipeline"), **error.extra) from None
                if error.retryable:  # the server asks for a retry, and the thread that carries the table retries longer
                    break
                found.append(error)
    return found + [None] * (len(spec.tables) - len(found))


def is_unreachable(error: HeadwaterError) -> bool:
    """Return whether no connection was made; a server that is slow or refuses temporarily is reachable."""
    return isinstance(error, Unavailable) and error.extra.get("sent") is False


def hint_of(spec: PipelineSpec, where: str) -> str:
    """Return the hint for a server that does not answer; `where` is the file that names the server."""
    return f"Is `headwater serve` running? `server` in {where} says {spec.server}"


def refusal(seen: TableAnswer, table: TableSpec, *, is_new: bool) -> HeadwaterError | None:
    """Return the error with which `table` cannot be carried, or None. Columns are checked for a new sink only."""
    if not isinstance(seen, Described):
        return seen
    try:
        if is_new:
            rows_schema(seen.table, table.columns)
    except HeadwaterError as error:
        return error
    return None
