"""Patches: the difference between two answers of one query, small if the answers are nearly the same.

Answers are compared as sent: row by row, by the JSON text of each row. So values that differ in the format, such as
1, 1.0 and true, differ in the patch, and a client checks the result by SHA-256 over its own texts (`Answer.hash`).
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import msgspec

from headwater.model import formats
from headwater.model.literal import Value, to_lit, to_plain
from headwater.model.table import Row
from headwater.queries.patch.steps import NoSteps, Steps, steps

SLACK = 1024  # bytes by which a patch may exceed the whole answer, as every patch of a tiny answer does
ROW_COST = 120  # bytes of one row in memory in addition to its text and its mark

_encode = msgspec.json.Encoder().encode
_cells = msgspec.json.Decoder(list[msgspec.Raw]).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True)
class Form:
    """The format of rows: each value encoded by `write`, each row as an array or as an object by column name."""

    write: Callable[[Value], Any] = to_lit
    as_objects: bool = False

    def text(self, names: Sequence[str], row: Row) -> bytes:
        """Return the JSON text of a row."""
        cells = [self.write(value) for value in row]
        return _encode(dict(zip(names, cells, strict=True)) if self.as_objects else cells)

    def key(self, names: Sequence[str], places: tuple[int, ...], text: bytes) -> bytes:
        """Return the key of a row, extracted from its text, as an array in both formats."""
        if self.as_objects:
            fields = _fields(text)
            return b"[%s]" % b",".join(bytes(fields[names[place]]) for place in places)
        cells = _cells(text)
        return b"[%s]" % b",".join(bytes(cells[place]) for place in places)


ROWS, OBJECTS, PLAIN = Form(), Form(as_objects=True), Form(to_plain)
FORMS = {formats.ROWS: ROWS, formats.OBJECTS: OBJECTS, formats.PLAIN: PLAIN}  # by result_format


@dataclass(frozen=True)
class Answer:
    """One answer as sent, with its tag. `key` are the columns that identify a row, None if no columns do."""

    tag: str
    columns: tuple[Any, ...]  # as sent: objects with a name
    key: tuple[int, ...] | None
    ordered: bool  # the order of the rows is part of the answer (`Analysis.is_total`)
    form: Form
    texts: tuple[bytes, ...]
    marks: tuple[bytes | None, ...]  # the values of each row, to find its text in another answer without encoding it

    @classmethod
    def of(
        cls,
        tag: str,
        columns: Iterable[Any],
        rows: Sequence[Row],
        *,
        key: tuple[int, ...] | None,
        ordered: bool = True,
        form: Form = ROWS,
        like: Answer | None = None,
    ) -> Answer:
        """Return the answer with `rows`; the text of rows that are also in `like` is reused."""
        sent = tuple(columns)
        names = [column["name"] for column in sent]
        marks = tuple(map(_mark, rows))
        known: dict[bytes | None, bytes] = {}
        if like is not None and like.form == form and like.columns == sent:
            known = dict(zip(like.marks, like.texts, strict=True))
            known.pop(None, None)
        texts = tuple(known.get(mark) or form.text(names, row) for mark, row in zip(marks, rows, strict=True))
        return cls(tag, sent, key if _tells_apart(key, rows) else None, ordered, form, texts, marks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(column["name"] for column in self.columns)

    @cached_property
    def rows_text(self) -> bytes:
        """Return the `rows` of the answer, byte for byte as sent."""
        return b"[%s]" % b",".join(self.texts)

    @cached_property
    def hash(self) -> str:
        """Return SHA-256 over `rows_text`; if the rows are unordered, over the texts sorted by bytes."""
        text = self.rows_text if self.ordered else b"[%s]" % b",".join(sorted(self.texts))
        return "sha256:" + hashlib.sha256(text).hexdigest()

    @cached_property
    def size(self) -> int:
        """Return about how many bytes of memory the answer takes."""
        return sum(map(len, self.texts)) + sum(len(mark or b"") for mark in self.marks) + ROW_COST * len(self.texts)

    def key_of(self, place: int) -> bytes:
        """Return the key of the row at index `place`, as sent; only if the answer has a `key`."""
        assert self.key is not None
        return self.form.key(self.names, self.key, self.texts[place])


def _tells_apart(key: tuple[int, ...] | None, rows: Sequence[Row]) -> bool:
    """Return whether `key` is unique in `rows`: a primary key of SQLite may contain NULL twice."""
    if not key:
        return key is not None and len(rows) <= 1
    return len(set(map(itemgetter(*key), rows))) == len(rows)


def _mark(row: Any) -> bytes | None:
    """Return the values of `row` with their types as bytes; None if a value cannot be marshalled."""
    try:
        return marshal.dumps(row, 2)  # the last version without back references, which make equal rows differ
    except ValueError:
        return None


def diff(base: Answer, fresh: Answer, *, include_full: bool = True) -> Any:
    """Return the patch from `base` to `fresh`, or a reset with all of `fresh` if no smaller patch exists.

    Encode the patch with msgspec: rows and keys are raw JSON texts.
    """
    try:
        found = _steps(base, fresh)
    except NoSteps as why:
        return reset(fresh, base.tag, str(why), include_full=include_full)
    patch = written(found, fresh, base.tag, "etag_cache", base.key_of)
    if len(_encode(patch)) > len(fresh.rows_text) + SLACK:
        return reset(fresh, base.tag, "patch_larger", include_full=include_full)
    return patch


def _steps(base: Answer, fresh: Answer) -> Steps:
    # An object can hold only one of two columns with the same name.
    is_ambiguous = len(set(fresh.names)) != len(fresh.names)
    if fresh.key is None or fresh.key != base.key or (is_ambiguous and fresh.form.as_objects):
        raise NoSteps("no_key")
    if base.columns != fresh.columns or base.form != fresh.form or base.ordered != fresh.ordered:
        raise NoSteps("columns_changed")
    return steps(base.texts, fresh.texts, base.key_of, fresh.key_of, ordered=fresh.ordered)


def written(
    found: Steps, fresh: Answer, base_tag: str | None, source: str, gone_key: Callable[[int], bytes]
) -> dict[str, Any]:
    """Return the steps in the format of a patch."""
    raw, as_row = msgspec.Raw, "obj" if fresh.form.as_objects else "row"

    def row(at: int, place: int) -> dict[str, Any]:
        return {"pk": raw(fresh.key_of(place)), "at": at, as_row: raw(fresh.texts[place])}

    return {
        "reset": False,
        "base_etag": base_tag,
        "base_source": source,
        "columns": fresh.columns,
        "added": [row(at, place) for at, place in found.added],
        "updated": [row(place, place) for place in found.updated],
        "removed": [{"pk": raw(gone_key(place))} for place in found.removed],
        "moved": [{"pk": raw(fresh.key_of(place)), "from": out_of, "to": into} for place, out_of, into in found.moved],
        **_ending(fresh),
    }


def reset(fresh: Answer, base_tag: str | None, reason: str, *, include_full: bool = True) -> dict[str, Any]:
    """Return a patch that replaces the client's rows; it contains the whole answer if `include_full`."""
    full = {"full": {"columns": fresh.columns, "rows": msgspec.Raw(fresh.rows_text)}} if include_full else {}
    return {
        "reset": True,
        "reset_reason": reason,
        "base_etag": base_tag,
        "columns": fresh.columns,
        **full,
        **_ending(fresh),
    }


def _ending(fresh: Answer) -> dict[str, Any]:
    return {"key": fresh.key, "ordered": fresh.ordered, "etag": fresh.tag, "result_hash": fresh.hash}
