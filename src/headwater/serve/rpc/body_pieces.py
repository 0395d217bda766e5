"""Response bodies encoded in pieces, so that a thread holds the interpreter for one piece, and rows are not copied."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import msgspec

from headwater.errors import Busy, HeadwaterError
from headwater.model.literal import Json, to_plain
from headwater.model.table import Row
from headwater.model.work.answer_limits import MEMORY, Reservation, bytes_of, too_large, weight
from headwater.serve.call import Send
from headwater.sources.query import ReadResult
from headwater.sources.write import Result

PIECE = 1 << 20  # approximate bytes
SMALL = 64 << 10  # bytes of values: a smaller answer with few rows is encoded in one step
MANY = 100  # rows: an answer with as many is not small
_BASE64 = PIECE // 4 * 3  # input bytes whose base64 is one piece
_CELL = 24  # bytes of a value in JSON besides its text
_BROKEN = re.compile("[\udc80-\udcff]")  # surrogates that represent bytes that are not UTF-8
_SPECIAL = re.compile(r'[",\r\n]')  # in CSV
_MARKER = f'"{secrets.token_hex(16)}"'.encode()  # stands for the pieces in JSON text; random: no value contains it

Write = Callable[[Any], Any]
_encode = msgspec.json.Encoder().encode


def is_small(read: ReadResult | Result) -> bool:
    """Return whether an answer is small enough to encode on the event loop."""
    return len(read.rows) < MANY and bytes_of(read.rows) < SMALL


class Pieces:
    """An encoded body, or a part of one. Raises AnswerTooLarge and Busy while it grows."""

    def __init__(self, most: int | None = None) -> None:
        self._pieces: list[bytes] = []
        self._most = MEMORY.max_bytes if most is None else min(most, MEMORY.max_bytes)
        self._reservation = Reservation()
        self.size = 0

    @classmethod
    def of(cls, body: bytes) -> Pieces:
        """Return a finished body in pieces, whatever its size. Raises Busy."""
        made = cls()
        made._reservation.take(min(len(body), MEMORY.max_bytes))
        made.fill(body)
        return made

    def reserve(self, size: int, caller: Hashable) -> None:
        """Reserve memory for a body of about `size` bytes, for `caller` unless it is None. Raises Busy."""
        self._reservation.take(min(size, MEMORY.max_bytes))
        if caller is not None:
            try:
                self._reservation.charge(caller)
            except Busy:
                self._reservation.release()
                raise

    def fill(self, body: bytes) -> None:
        """Hold `body`, for which memory was reserved."""
        self._pieces = [body[start : start + PIECE] for start in range(0, len(body), PIECE)]
        self.size = len(body)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)

    def add(self, piece: bytes) -> None:
        """Append `piece`; if the body becomes too large, release all pieces and raise AnswerTooLarge or Busy."""
        self.size += len(piece)
        try:
            if self.size > self._most:
                raise too_large(self._most)
            self._reservation.take(self.size)
        except HeadwaterError:  # the error may keep a reference to this object
            self._pieces.clear()
            self._reservation.release()
            raise
        self._pieces.append(piece)

    def around(self, before: bytes, after: bytes) -> Pieces:
        """Put `before` and `after` around the body; the size limit does not apply to them."""
        self._pieces = [before, *self._pieces, after]
        self.size += len(before) + len(after)
        return self

    def charge(self, caller: Hashable) -> None:
        """Charge the memory of a finished body to its reader, who may read slowly. Raises Busy."""
        self._reservation.charge(caller)

    def release(self) -> None:
        """Release the memory."""
        self._pieces.clear()
        self._reservation.release()

    def joined(self) -> bytes:
        """Return the body as one bytes object."""
        return b"".join(self._pieces)


def size_of(body: bytes | Pieces) -> int:
    """Return the size of a body in bytes."""
    return len(body) if isinstance(body, bytes) else body.size


async def send_body(send: Send, body: bytes | Pieces) -> None:
    """Send a whole body, piece by piece as the client reads it, and release its memory."""
    if isinstance(body, Pieces):
        try:
            for piece in body:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            body.release()
        body = b""
    await send({"type": "http.response.body", "body": body})


def encode_with(value: Any) -> bytes | Pieces:
    """Return `value` as JSON; the result is Pieces if `value` contains a Pieces, at most one."""
    found_pieces: list[Pieces] = []

    def mark(found: Any) -> msgspec.Raw:
        if not isinstance(found, Pieces):
            raise TypeError(f"{type(found)} cannot be encoded")
        found_pieces.append(found)
        return msgspec.Raw(_MARKER)

    text = msgspec.json.encode(value, enc_hook=mark)
    if not found_pieces:
        return text
    before, _, after = text.partition(_MARKER)
    return found_pieces[0].around(before, after)


def data_pieces(read: ReadResult, write: Write, *, named: bool = False) -> Pieces:
    """Return `data` of an answer: columns and rows, each row an array, or an object if `named`."""
    body = Pieces()
    body.add(b'{"columns":' + _encode([{"name": name} for name in read.columns]) + b',"rows":')
    _JsonRows(body, write, read.columns if named else None).write_all(read.rows)
    body.add(b',"truncated":true}' if read.truncated else b"}")
    return body


def plain_rows(rows: Sequence[Row], most: int) -> Pieces:
    """Return rows as arrays of plain JSON."""
    body = Pieces(most)
    _JsonRows(body, to_plain, None).write_all(rows)
    return body


def batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield the rows in groups of about one piece; a larger row is a group of its own."""
    start = heavy = 0
    for place, row in enumerate(rows):
        heavy += weight(row) + _CELL * len(row)
        if heavy > PIECE and place > start:
            yield rows[start:place]
            start, heavy = place, weight(row) + _CELL * len(row)
    if start < len(rows):
        yield rows[start:]


class _JsonRows:
    """Writes rows as JSON."""

    def __init__(self, body: Pieces, write: Write, names: Sequence[str] | None) -> None:
        self._body, self._write = body, write
        self._names = names
        self._labels = [] if names is None else [_encode(name) + b":" for name in names]

    def write_all(self, rows: Sequence[Row]) -> None:
        """Write all rows, in brackets."""
        comma = b"["
        for batch in batches(rows):
            self._body.add(comma)
            comma = b","
            if len(batch) == 1 and weight(batch[0]) > PIECE:
                self._write_large(batch[0])
            else:
                self._body.add(_encode([self._made(row) for row in batch])[1:-1])
        self._body.add(b"[]" if comma == b"[" else b"]")

    def _made(self, row: Row) -> Any:
        write = self._write
        if self._names is None:
            return [write(value) for value in row]
        return {name: write(value) for name, value in zip(self._names, row, strict=True)}

    def _write_large(self, row: Row) -> None:
        add = self._body.add
        add(b"[" if self._names is None else b"{")
        for place, value in enumerate(row):
            label = self._labels[place] if self._labels else b""
            add(b"," + label if place else label)
            for piece in self._value(value):
                add(piece)
        add(b"]" if self._names is None else b"}")

    def _value(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, str) and len(value) > PIECE:
            raw = _broken_bytes(value)
            if raw is None:
                yield from self._filled("", b'""', (_encode(part)[1:-1] for part in _parts(value)))
            else:
                yield from self._filled(b"", b'""', _base64(raw))
        elif isinstance(value, bytes) and len(value) > PIECE:
            yield from self._filled(b"", b'""', _base64(value))
        elif isinstance(value, Json) and len(value.text) > PIECE:
            yield from self._filled(Json("null"), b"null", (part.encode() for part in _parts(value.text)))
        else:
            yield _encode(self._write(value))

    def _filled(self, empty: Any, content: bytes, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the JSON that `write` returns for `empty`, with `parts` in place of its `content`."""
        before, _, after = _encode(self._write(empty)).rpartition(content)
        mark = content[:1] if content == b'""' else b""
        yield before + mark
        yield from parts
        yield mark + after


def csv_pieces(read: ReadResult) -> Pieces:
    """Return CSV as in RFC 4180, with CRLF; NULL is empty, an empty text is quoted.

    Python's `csv` is not used: its output differs between versions, and one ETag must mean one sequence of bytes.
    """
    body = Pieces()
    body.add(_utf8(",".join(map(_quoted, read.columns)) + "\r\n"))
    for batch in batches(read.rows):
        if len(batch) > 1 or weight(batch[0]) <= PIECE:
            body.add(_utf8("".join([",".join(map(_cell, row)) + "\r\n" for row in batch])))
            continue
        for place, value in enumerate(batch[0]):
            if place:
                body.add(b",")
            for piece in _cell_pieces(value):
                body.add(piece)
        body.add(b"\r\n")
    return body


def _cell_pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes) and len(value) > PIECE:
        yield from _base64(value)
    elif isinstance(value, str) and len(value) > PIECE and (raw := _broken_bytes(value)) is not None:
        yield from _base64(raw)
    elif isinstance(value, str) and len(value) > PIECE:
        quote = b'"' if any(_SPECIAL.search(part) for part in _parts(value)) else b""
        yield quote
        yield from (_utf8(part.replace('"', '""')) for part in _parts(value))
        yield quote
    else:
        yield _utf8(_cell(value))


def _cell(value: Any) -> str:
    plain = to_plain(value)
    if plain is None:
        return ""
    return _quoted(_encode(plain).decode() if isinstance(plain, (dict, list, bool)) else str(plain))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if not text or _SPECIAL.search(text) else text


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _parts(text: str) -> Iterator[str]:
    size = PIECE // 4
    return (text[start : start + size] for start in range(0, len(text), size))


def _broken_bytes(text: str) -> bytes | None:
    """Return the bytes that `text` represents if they are not UTF-8; else None."""
    if not any(_BROKEN.search(part) for part in _parts(text)):
        return None
    found = bytearray()
    for part in _parts(text):
        found += part.encode("utf-8", "surrogateescape")
    return bytes(found)


def _base64(data: bytes) -> Iterator[bytes]:
    with memoryview(data) as view:
        for start in range(0, len(data), _BASE64):
            yield base64.b64encode(view[start : start + _BASE64])
