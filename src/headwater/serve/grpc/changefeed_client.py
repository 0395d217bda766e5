"""A client of change feeds whose errors do not depend on gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc

from headwater.model.clock import MAX_COUNTER, ts_ms, ts_of_ms, ts_text
from headwater.serve.grpc.messages import message

PATH = "/headwater.v1.ChangeFeedService/ChangeFeed"
UNREACHABLE = grpc.StatusCode.UNAVAILABLE
OPTIONS = (("grpc.max_receive_message_length", -1),)  # a message is as large as a row


class FeedEnded(Exception):
    """The end of a feed: the error, a hint, and whether to reconnect from the last checkpoint."""

    def __init__(self, error: grpc.RpcError) -> None:
        trailers = {each.key: str(each.value) for each in error.trailing_metadata() or ()}
        self.message = error.details() or error.code().name
        self.hint = trailers.get("headwater-hint", "")
        self.wait_ms = int(trailers.get("retry-after-ms", "0"))
        self.retryable = error.code() is UNREACHABLE or bool(self.wait_ms)
        self.unreachable = "headwater-code" not in trailers and error.code() is UNREACHABLE
        super().__init__(self.message)


class ServerConnection:
    """A connection to a server. With `tls` it is encrypted, and `ca` is trusted besides the system's authorities."""

    def __init__(self, address: str, token: str | None = None, *, tls: bool = False, ca: bytes | None = None) -> None:
        if tls:
            trusted = grpc.ssl_channel_credentials(root_certificates=ca)
            self._channel = grpc.secure_channel(address, trusted, options=OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def feed(
        self, db: str, spans: list[dict[str, str]], base: int | None, *, is_offset: bool = False, **more: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield a feed's events after `base`, a time or an offset, as dicts; FeedEnded if it ends with an error."""
        request = message("headwater.v1.ChangeFeedRequest")(db=db, spans=spans, **more)
        if base is not None and is_offset:
            request.base_offset = base
        elif base is not None:
            request.base.ms, request.base.counter = ts_ms(base), base & MAX_COUNTER
        open_feed: Any = self._channel.unary_stream
        read = message("headwater.v1.ChangeFeedResponse").FromString
        call = open_feed(PATH, response_deserializer=read)(request.SerializeToString(), metadata=self._metadata)
        try:
            for response in call:
                for event in response.events:
                    yield _plain(event)
        except grpc.RpcError as error:
            raise FeedEnded(error) from None
        finally:
            call.cancel()


def _plain(event: Any) -> dict[str, Any]:
    """Return an event as JSON: keys in hex, times as text, rows as they are."""
    kind = event.WhichOneof("event")
    content = getattr(event, kind)
    found: dict[str, Any] = {"event": kind}
    for field, value in content.ListFields():
        found[field.name] = _shown(field, value)
    if kind == "value":
        found.setdefault("value", None)
    return found


def _shown(field: Any, value: Any) -> Any:
    if field.name in ("ts", "threshold"):
        return ts_text(ts_of_ms(value.ms) | value.counter)
    if field.name in ("value", "prev_value"):
        return json.loads(value)
    if field.name in ("span", "spans"):
        return [_span(each) for each in value] if field.name == "spans" else _span(value)
    if field.name == "reason":
        return field.enum_type.values_by_number[value].name
    if isinstance(value, bytes):
        return value.hex()
    return list(value) if field.name == "unavailable" else value


def _span(span: Any) -> dict[str, Any]:
    return {field.name: value.hex() if isinstance(value, bytes) else value for field, value in span.ListFields()}
