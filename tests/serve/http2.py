"""Frames of HTTP/2 for raw connections: a gRPC client would not send such."""

HEADERS, SETTINGS, CONTINUATION = 1, 4, 9  # types of frames
END_STREAM, END_HEADERS, ACK = 1, 4, 1  # flags


def frame(kind: int, flags: int, payload: bytes = b"", stream: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: bytes, value: bytes) -> bytes:
    """Return a header that HPACK neither indexes nor compresses."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0)


def headers(path: str) -> bytes:
    """Return the headers of a call."""
    sent = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers"}
    sent["content-type"] = "application/grpc"
    return b"".join(field(name.encode(), value.encode()) for name, value in sent.items())
