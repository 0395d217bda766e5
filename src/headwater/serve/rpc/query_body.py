"""Query results encoded as JSON rows or objects, CSV or Arrow; one ETag means one sequence of bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model import arrow
from headwater.model.dependencies.dependency import Analysis
from headwater.model.dependencies.description import words
from headwater.model.formats import ARROW, CSV, OBJECTS, PLAIN, QUERY_FORMATS, ROWS, UNSERVED_FORMATS
from headwater.model.literal import to_lit, to_plain
from headwater.model.table import Column, Table
from headwater.queries.answers import Answer
from headwater.queries.etag.causality import token
from headwater.queries.queries import Explanation
from headwater.serve.rpc.body_pieces import Pieces, batches, csv_pieces, data_pieces, encode_with, is_small
from headwater.sources.query import ReadResult


def rpc_format(name: str | None) -> str:
    """Return the result format of an RPC request; InvalidRequest if unknown, NotSupported if not implemented."""
    if name in UNSERVED_FORMATS:
        raise NotSupported(f"result_format {name!r} is not supported", hint=f"Use one of {', '.join(QUERY_FORMATS)}.")
    if name is not None and name not in QUERY_FORMATS:
        raise InvalidRequest(f"unknown result_format {name[:40]!r}", hint=f"Use one of {', '.join(QUERY_FORMATS)}.")
    return name or ROWS


def data_of(read: ReadResult, format: str) -> dict[str, Any]:
    """Return the field `data` of an answer, with columns and rows in `format`, not encoded yet."""
    write = to_plain if format == PLAIN else to_lit
    rows: list[Any]
    if format == OBJECTS:
        check_names(read.columns)
        rows = [{name: write(value) for name, value in zip(read.columns, row, strict=True)} for row in read.rows]
    else:
        rows = [[write(value) for value in row] for row in read.rows]
    data: dict[str, Any] = {"columns": columns_of(read), "rows": rows}
    return data | {"truncated": True} if read.truncated else data


def columns_of(read: ReadResult) -> list[dict[str, Any]]:
    """Return the field `columns` of an answer."""
    return [{"name": name} for name in read.columns]


def check_names(columns: tuple[str, ...]) -> None:
    """Raise InvalidRequest if two columns have one name: an object cannot hold both."""
    for name, count in Counter(columns).items():
        if count > 1:
            raise InvalidRequest(
                f"two columns are called {name!r}; an object can hold only one",
                hint='Give them different names with AS, or set result_format to "rows_json".',
            )


def encode_data(read: ReadResult, format: str) -> Pieces:
    """Return the field `data` of an answer, encoded piece by piece; AnswerTooLarge or Busy if it takes too much."""
    if format == OBJECTS:
        check_names(read.columns)
    return data_pieces(read, to_plain if format == PLAIN else to_lit, named=format == OBJECTS)


def body_of(answer: Answer, format: str) -> bytes | Pieces:
    """Return the body of a GET response as CSV, Arrow or JSON; AnswerTooLarge or Busy if it takes too much."""
    assert answer.read is not None
    if format == CSV:
        return csv_pieces(answer.read)
    if format == ARROW:
        return _arrow(answer.read)
    return encode_with({"etag": answer.etag, "data": written_data(answer.read, format)})


def written_data(read: ReadResult, format: str) -> dict[str, Any] | Pieces:
    """Return the field `data` of an answer, for `encode_with`: encoded already if it is large."""
    return data_of(read, format) if is_small(read) else encode_data(read, format)


def _arrow(read: ReadResult) -> Pieces:
    """Return an Arrow stream; the type of each column is derived from its values."""
    table = Table("answer", tuple(Column(name, _kind(read, place)) for place, name in enumerate(_unique(read.columns))))
    schema = arrow.schema(table)
    if read.truncated:
        schema = schema.with_metadata({**(schema.metadata or {}), b"truncated": b"true"})
    stream, body = arrow.ArrowStream(schema), Pieces()
    body.add(stream.start())
    for rows in batches(read.rows) if read.rows else [()]:
        body.add(stream.batch(arrow.rows_batch(table, rows)))
    body.add(stream.end())
    return body


_KINDS = {bool: "bool", int: "i64", float: "f64", str: "str", bytes: "bytes"}


def _kind(read: ReadResult, place: int) -> str:
    types = {type(row[place]) for row in read.rows} - {type(None)}
    return _KINDS.get(types.pop(), "any") if len(types) == 1 else "any"


def _unique(names: tuple[str, ...]) -> list[str]:
    """Return distinct names, because Arrow finds columns by name: the second `a` becomes `a_2`."""
    found: dict[str, None] = {}
    numbers: dict[str, int] = {}  # the last suffix used for a name
    for name in names:
        made, number = name, numbers.get(name, 1)
        while made in found:
            number += 1
            made = f"{name}_{number}"
        numbers[name] = number
        found[made] = None
    return list(found)


def about(answer: Answer) -> dict[str, Any]:
    """Return the result of query.select and query.execute_prepared without its rows."""
    seen = token(answer.instance.prepared.db, answer.seen)
    return {
        "etag": answer.etag,
        "not_modified": answer.not_modified,
        "deps": {"tables": seen.deps},
        "causality": seen,
    }


def prepared(found: Explanation) -> dict[str, Any]:
    """Return the result of query.prepare."""
    query, analysis = found.prepared, found.analysis
    answer: dict[str, Any] = {
        "query_id": query.id,
        "db": query.db,
        "canonical": {"sql": query.sql} if query.form is None else msgspec.Raw(query.form),
        "parameters": list(analysis.parameters),
        "columns": [{"name": name} for name in analysis.columns],
        "cacheable": analysis.is_cacheable,
    }
    return answer if query.name is None else answer | {"name": query.name}


def explained(found: Explanation) -> dict[str, Any]:
    """Return the result of query.explain."""
    analysis: Analysis = found.analysis
    return {
        **prepared(found),
        "sql": analysis.sql,
        "table_keys": [f"{found.prepared.db}.{name}" for name in analysis.tables],
        "dependencies": list(words(analysis)),
        "volatile": list(analysis.volatile),
        "doubts": list(analysis.doubts),
        "ordered": analysis.is_total,
        "guards": len(analysis.guards),
    }
