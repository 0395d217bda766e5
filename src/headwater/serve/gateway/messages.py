"""The messages of the JSON gateway, in the format of SochDB's clients. No I/O."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest, OffsetExpired, RequestTooLarge
from headwater.model import json_decoder
from headwater.model.control_events import ControlEvent
from headwater.model.suggestion import nearest
from headwater.queries.statements.sql import Outcome
from headwater.serve.http.transport_frames import OPS, text_fragments, text_frame
from headwater.serve.limits.request_body import MAX_ELEMENTS, check_elements
from headwater.serve.rpc.body_pieces import PIECE, Pieces, encode_with, plain_rows
from headwater.serve.rpc.envelope import clean
from headwater.serve.rpc.params import Nothing, Params, explain

LONGEST_ID = 200  # characters; the id is sent with every change
EXAMPLE = 'Send one JSON object, such as {"id": "1", "type": "sql", "payload": {"query": "SELECT 1"}}.'
_NAMESPACE = "default"
FIELDS = {"ops": "operations", "table": "tables"}  # our names of feed fields, and those of `subscribe`
MAX_ANSWER = 16 << 20  # bytes of the rows of `sql`: a client receives each message as a whole
_ERROR = b"!"  # first byte of the line that ends a subscription; lines of changes begin with a brace

Id = Annotated[str, msgspec.Meta(max_length=LONGEST_ID)] | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message from a client."""

    id: Id
    type: str
    payload: msgspec.Raw = msgspec.Raw(b"")


class Sql(Params):
    """Parameters of `sql`: a statement and its arguments."""

    query: str
    params: list[Any] | dict[str, Any] = []
    namespace: str = _NAMESPACE


class KvKey(Params):
    """Parameters of `kv_get` and `kv_delete`: the key, as text or base64."""

    key: str | None = None
    key_base64: str | None = None
    namespace: str = _NAMESPACE


class KvPut(Params):
    """Parameters of `kv_put`: key and value, as text or base64, and when they expire."""

    key: str | None = None
    key_base64: str | None = None
    value: str | None = None
    value_base64: str | None = None
    namespace: str = _NAMESPACE
    ttl_seconds: Sequence = 0


class Subscribe(Params):
    """Parameters of `subscribe`: filters, and the sequence to begin with."""

    tables: list[str] = []
    operations: list[str] = []
    start_sequence: Sequence = 0
    where: str | None = None
    namespace: str = _NAMESPACE


class Unsubscribe(Params):
    """Parameters of `unsubscribe`: the id of the `subscribe` message."""

    id: Id


TYPES: dict[str, type[Params]] = {
    "sql": Sql,
    "kv_get": KvKey,
    "kv_put": KvPut,
    "kv_delete": KvKey,
    "subscribe": Subscribe,
    "unsubscribe": Unsubscribe,
    "ping": Nothing,
}
_messages = json_decoder.decoder(Message)
_payloads = {name: json_decoder.decoder(kind) for name, kind in TYPES.items()}
_FIRST_ID = re.compile(r'[ \n]{0,9}\{[ \n]{0,9}"id" {0,9}: {0,9}("[^"\\]{0,200}"|-?[0-9]{1,19})(?=[\s,}])')
_FAULTS = (msgspec.MsgspecError, ValueError, RecursionError)


class Request(msgspec.Struct, frozen=True):
    """A decoded message, or the error that it caused; `type` is a known type, or empty."""

    id: str | int = ""
    type: str = ""
    payload: Params | None = None
    error: HeadwaterError | None = None


def undecoded(text: str | None) -> Request:
    """Return a request with only the id of a frame, if the frame begins with it."""
    found = _FIRST_ID.match(text or "")
    try:
        id: str | int = "" if found is None else msgspec.convert(msgspec.json.decode(found[1]), Id)
    except _FAULTS:
        id = ""
    return Request(id)


def read(text: str | None) -> Request:
    """Return the request in a frame (None: a binary one), which may be an error; call it in a thread if large."""
    if text is None:
        return Request(error=InvalidRequest("frames are JSON text, not binary", hint=EXAMPLE))
    try:
        body = text.encode()
        check_elements(body, MAX_ELEMENTS)
        message = _messages.decode(body)
    except RequestTooLarge as large:
        return Request(error=large)
    except _FAULTS as fault:
        return _unread(text, fault)
    decoder = _payloads.get(message.type)
    if decoder is None:
        error = InvalidRequest(f"Unknown message type: {message.type[:40]}", hint=nearest(message.type, TYPES))
        return Request(message.id, error=error)
    raw = message.payload
    try:
        found: Params = decoder.decode(b"{}" if bytes(raw) in (b"", b"null") else raw)
    except _FAULTS as fault:
        return Request(message.id, message.type, error=explain(fault, "payload", TYPES[message.type]))
    return Request(message.id, message.type, found)


def _unread(text: str, fault: Exception) -> Request:
    """Return a request with the error of a text that is not a message, and the text's id if it has one."""
    try:
        found = json_decoder.decode(text)
    except _FAULTS:
        why = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        return Request(error=InvalidRequest(f"Invalid JSON: {why}", hint=EXAMPLE))
    if not isinstance(found, dict):
        return Request(error=InvalidRequest("Invalid JSON: not an object", hint=EXAMPLE))
    try:
        id: str | int = msgspec.convert(found.get("id"), Id)
    except msgspec.ValidationError:
        id = ""
    return Request(id, error=explain(fault, "message", Message))


def bytes_of(field: str, text: str | None, encoded: str | None) -> bytes:
    """Return the bytes of `field`, given as text or as base64; InvalidRequest if neither or both are given."""
    if (text is None) == (encoded is None):
        raise InvalidRequest(
            f"payload: exactly one of `{field}` and `{field}_base64` is needed",
            hint=f"Send `{field}` as text, or `{field}_base64` for bytes that are not text.",
        )
    if text is not None:
        return text.encode()
    try:
        return base64.b64decode((encoded or "").encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest(f"payload.{field}_base64 is not base64", hint="Use RFC 4648 with its padding.") from None


# --- answers -------------------------------------------------------------------------------------------------


def frame(id: str | int, type: str, payload: bytes) -> bytes:
    """Return one answer as a frame."""
    return text_frame(b"%b%b}" % (_head(id, type), payload))


def fragments(id: str | int, type: str, payload: Pieces) -> Iterator[bytes]:
    """Yield one large answer as fragments of a frame."""
    return text_fragments(payload.around(_head(id, type), b"}"))


def _head(id: str | int, type: str) -> bytes:
    return b'{"id":%b,"type":"%b","payload":' % (encode(id), type.encode())


def error_payload(error: HeadwaterError) -> bytes:
    """Return the payload of an error message."""
    body: dict[str, Any] = {"message": clean(error.message), "code": error.code}
    if error.details:
        body["details"] = clean(error.details)
    return encode(body)


def rows_payload(outcome: Outcome) -> bytes | Pieces:
    """Return the payload of `sql`: rows in plain JSON and the number of written rows. Raises AnswerTooLarge, Busy."""
    body: dict[str, Any] = {
        "columns": [clean(name) for name in outcome.columns],
        "rows": plain_rows(outcome.rows, MAX_ANSWER),
        "affected": outcome.affected,
        "last_insert_id": outcome.last_insert_id,
    }
    if outcome.truncated:
        body["truncated"] = True
    if outcome.causality is not None:
        body["causality"] = outcome.causality
    made = encode_with(body)
    return made.joined() if isinstance(made, Pieces) and made.size <= PIECE else made


# --- subscriptions -------------------------------------------------------------------------------------------


def line(id: int | str, word: str, data: bytes) -> bytes:
    """Return an event as a line, to which `event_frames` adds each reader's id; b"" for most control events."""
    if word in OPS:
        return data + b"\n"
    if word == ControlEvent.FAILED:
        return _ERROR + data + b"\n"
    if word == ControlEvent.RESNAPSHOT:
        error = {"message": "changes of this subscription were evicted from the log", "code": OffsetExpired.code}
        details = {**msgspec.json.decode(data), "hint": OffsetExpired.default_hint}
        return _ERROR + encode({**error, "details": details}) + b"\n"
    return b""


def event_frames(id: str | int, piece: bytes) -> bytes:
    """Return lines made by `line` as the frames of one subscription."""
    event = b'{"id":%b,"type":"event","payload":' % encode(id)
    frames = []
    for each in piece.split(b"\n")[:-1]:
        if each.startswith(_ERROR):
            frames.append(frame(id, "error", each[1:]))
        else:
            frames.append(text_frame(event + each + b"}"))
    return b"".join(frames)
