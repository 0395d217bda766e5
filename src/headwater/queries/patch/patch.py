"""Patches: the difference between two answers of one query, small where the answers are nearly the same.

An answer is compared as it is sent: row by row, by the JSON text of each row. So 1, 1.0 and true differ, whatever the
format keeps apart is kept apart, and a client checks by SHA-256 over the very texts it holds (`Answer.hash`).
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

SLACK = 1024  # bytes: a patch may be larger than the whole answer by so much, as every patch of a tiny answer is
ROW_COST = 120  # bytes of one row in memory besides its text and its mark

_encode = msgspec.json.Encoder().encode
_cells = msgspec.json.Decoder(list[msgspec.Raw]).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True)
class Form:
    """How rows are written: each value by `write`, each row as an array or as an object by column."""

    write: Callable[[Value], Any] = to_lit
    as_objects: bool = False

    def text(self, names: Sequence[str], row: Row) -> bytes:
        """One row as it is sent."""
        cells = [self.write(value) for value in row]
        return _encode(dict(zip(names, cells, strict=True)) if self.as_objects else cells)

    def key(self, names: Sequence[str], places: tuple[int, ...], text: bytes) -> bytes:
        """The key of a row, cut out of its text: an array, in objects too."""
        if self.as_objects:
            fields = _fields(text)
            return b"[%s]" % b",".join(bytes(fields[names[place]]) for place in places)
        cells = _cells(text)
        return b"[%s]" % b",".join(bytes(cells[place]) for place in places)


ROWS, OBJECTS, PLAIN = Form(), Form(as_objects=True), Form(to_plain)
FORMS = {formats.ROWS: ROWS, formats.OBJECTS: OBJECTS, formats.PLAIN: PLAIN}  # by result_format


@dataclass(frozen=True)
class Answer:
    """One answer as it is sent, under its tag. `key` are the places that tell its rows apart, None if none do."""

    tag: str
    columns: tuple[Any, ...]  # as they are sent: objects with a name
    key: tuple[int, ...] | None
    ordered: bool  # whether the order of the rows is part of the answer (`Analysis.is_total`)
    form: Form
    texts: tuple[bytes, ...]
    marks: tuple[bytes | None, ...]  # the values of each row, to find its text again without writing it

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
        """Write `rows`; those that stand in `like` too are not written again."""
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
        """The columns' names."""
        return tuple(column["name"] for column in self.columns)

    @cached_property
    def rows_text(self) -> bytes:
        """The `rows` of the answer, byte for byte as they are sent."""
        return b"[%s]" % b",".join(self.texts)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over `rows_text`; where the order means nothing, over the texts sorted by their bytes."""
        text = self.rows_text if self.ordered else b"[%s]" % b",".join(sorted(self.texts))
        return "sha256:" + hashlib.sha256(text).hexdigest()

    @cached_property
    def size(self) -> int:
        """About how many bytes of memory it takes."""
        return sum(map(len, self.texts)) + sum(len(mark or b"") for mark in self.marks) + ROW_COST * len(self.texts)

    def key_of(self, place: int) -> bytes:
        """The key of the row at `place`, as it is sent."""
        assert self.key is not None
        return self.form.key(self.names, self.key, self.texts[place])


def _tells_apart(key: tuple[int, ...] | None, rows: Sequence[Row]) -> bool:
    """Whether `key` keeps its promise here: a primary key of SQLite may hold NULL twice."""
    if not key:
        return key is not None and len(rows) <= 1
    return len(set(map(itemgetter(*key), rows))) == len(rows)


def _mark(row: Any) -> bytes | None:
    """The values of `row` with their types; None for kinds that have no such short form."""
    try:
        return marshal.dumps(row, 2)  # of the versions that know floats exactly, the last without back references
    except ValueError:
        return None


def diff(base: Answer, fresh: Answer, *, window: dict[str, int] | None = None, include_full: bool = True) -> Any:
    """What leads from `base` to `fresh`, in the seed's shape; a reset with all of `fresh` where nothing smaller does.

    Encode it with msgspec: rows and keys are held as the texts they are sent by.
    """
    try:
        found = _steps(base, fresh)
    except NoSteps as why:
        return reset(fresh, base.tag, str(why), window=window, include_full=include_full)
    patch = written(found, fresh, base.tag, "etag_cache", base.key_of, window=window)
    if len(_encode(patch)) > len(fresh.rows_text) + SLACK:
        return reset(fresh, base.tag, "patch_larger", window=window, include_full=include_full)
    return patch


def _steps(base: Answer, fresh: Answer) -> Steps:
    if fresh.key is None or fresh.key != base.key or (fresh.form.as_objects and _is_ambiguous(fresh.names)):
        raise NoSteps("no_key")
    if base.columns != fresh.columns or base.form != fresh.form or base.ordered != fresh.ordered:
        raise NoSteps("columns_changed")
    return steps(base.texts, fresh.texts, base.key_of, fresh.key_of, ordered=fresh.ordered)


def _is_ambiguous(names: tuple[str, ...]) -> bool:
    return len(set(names)) != len(names)  # an object keeps one of two columns of one name


def written(
    found: Steps,
    fresh: Answer,
    base_tag: str | None,
    source: str,
    gone_key: Callable[[int], bytes],
    *,
    window: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The steps as the patch that is sent."""
    raw, as_row = msgspec.Raw, "obj" if fresh.form.as_objects else "row"

    def row(at: int, place: int) -> dict[str, Any]:
        return {"pk": raw(fresh.key_of(place)), "at": at, as_row: raw(fresh.texts[place])}

    return {
        "reset": False,
        "base_etag": base_tag,
        "base_source": source,
        "columns": fresh.columns,
        **({} if window is None else {"window": window}),
        "added": [row(at, place) for at, place in found.added],
        "updated": [row(place, place) for place in found.updated],
        "removed": [{"pk": raw(gone_key(place))} for place in found.removed],
        "moved": [{"pk": raw(fresh.key_of(place)), "from": out_of, "to": into} for place, out_of, into in found.moved],
        **_ending(fresh),
    }


def reset(
    fresh: Answer, base_tag: str | None, reason: str, *, window: dict[str, int] | None = None, include_full: bool = True
) -> dict[str, Any]:
    """A patch that says: forget what you have. With the whole answer, unless it is not wanted."""
    full = {"full": {"columns": fresh.columns, "rows": msgspec.Raw(fresh.rows_text)}} if include_full else {}
    return {
        "reset": True,
        "reset_reason": reason,
        "base_etag": base_tag,
        "columns": fresh.columns,
        **({} if window is None else {"window": window}),
        **full,
        **_ending(fresh),
    }


def _ending(fresh: Answer) -> dict[str, Any]:
    return {"key": fresh.key, "ordered": fresh.ordered, "etag": fresh.tag, "result_hash": fresh.hash}
