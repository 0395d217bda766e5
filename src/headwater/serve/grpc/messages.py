"""The messages of the .proto files, in a descriptor pool of our own.

A client in the same process may have loaded its own `sochdb.v1`: in the common pool the two would clash.
`protos.bin` is what `make protos` compiles the files to; a test compiles them again and compares.
"""

from __future__ import annotations

import functools
import threading
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

LARGE = 64 << 10  # bytes: larger messages are decoded in a thread, not in the event loop
MAX_FIELDS = 100_000  # of a large message: the library creates an object for each element
FOLDER = resources.files("headwater.serve.grpc") / "protos"


_lock = threading.Lock()
_classes: dict[str, Any] = {}


def pool() -> descriptor_pool.DescriptorPool:
    """Return the pool with all of our files."""
    with _lock:
        return _pool()


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "protos.bin").read_bytes())
    found = descriptor_pool.DescriptorPool()
    for file in files.file:
        found.Add(file)
    return found


def message(name: str) -> Any:
    """Return the class of the message `name`, such as `sochdb.v1.SubscribeEvent`; the same for every thread.

    A cache alone would let two threads make two of them, and a message of one does not fit into one of the other.
    """
    found = _classes.get(name)
    if found is None:
        with _lock:
            found = _classes.get(name)
            if found is None:
                found = _classes[name] = message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))
    return found


def _new(package: str, name: str, /, **fields: Any) -> Any:
    return message(f"{package}.{name}")(**fields)


# Return a new message, by its name in one of our packages.
headwater_v1 = functools.partial(_new, "headwater.v1")
sochdb_v1 = functools.partial(_new, "sochdb.v1")


def check_fields(data: bytes) -> None:
    """Raise ValueError if a large message has more than `MAX_FIELDS` fields, or is malformed.

    Only the outermost fields count: no request of ours repeats a field further inside.
    """
    if len(data) <= LARGE:
        return
    at, count, end = 0, 0, len(data)
    try:
        while at < end:
            count += 1
            if count > MAX_FIELDS:
                raise ValueError(f"the message has more than {MAX_FIELDS} fields")
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _BYTES:
                size, at = _varint(data, at)
                at += size
            else:
                at += _SIZES[kind]
    except (IndexError, KeyError):
        raise ValueError("the message cannot be read") from None


_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 3: 0, 4: 0, 5: 4}  # bytes after a tag, by kind; 3 and 4 are the ends of a group


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and its end."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(at)


def decode(name: str, data: bytes) -> Any:
    """Decode a message of that name; ValueError if `data` is invalid, or has too many fields."""
    check_fields(data)
    try:
        return message(name).FromString(data)
    except Exception as error:  # the library's own error, without a public name in every version
        raise ValueError(f"not a {name}: {error}") from None
