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

FOLDER = resources.files("headwater.serve.grpc") / "protos"


_lock = threading.Lock()
_classes: dict[str, Any] = {}


def pool() -> descriptor_pool.DescriptorPool:
    """Every file of ours."""
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
    """The class of the message `name`, such as `sochdb.v1.SubscribeEvent`: one, whatever thread asks for it first.

    A cache alone would let two threads make two of them, and a message of one does not fit into one of the other.
    """
    found = _classes.get(name)
    if found is None:
        with _lock:
            found = _classes.get(name)
            if found is None:
                found = _classes[name] = message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))
    return found


def decode(name: str, data: bytes) -> Any:
    """A message of that name; ValueError where `data` is none."""
    try:
        return message(name).FromString(data)
    except Exception as error:  # its own kind of error, of no public name in every version
        raise ValueError(f"not a {name}: {error}") from None
