"""Count of the bytes that libpq has read from its socket: libpq buffers a whole row or error and hides its size."""

from __future__ import annotations

import array
import ctypes
import fcntl
import socket
import struct
import sys
import termios

LEAST_READ = 8 << 10  # bytes that libpq has room for whenever it reads
LARGE_READ = 64 << 10  # waiting bytes that belong to no short message
BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info


class ReceivedBytes:
    """The bytes read from a socket since creation.

    On Linux, TCP reports the exact number. Elsewhere it is estimated from the bytes waiting before and after a read,
    though more may be received in between.
    """

    def __init__(self, descriptor: int, *, is_one_message: bool = False) -> None:
        """Count reads of a socket; `is_one_message`: libpq makes room for all of it and reads most waiting bytes."""
        self._descriptor, self._is_one_message = descriptor, is_one_message
        self._waiting = 0
        self._total = _tcp_total(descriptor)

    def before_read(self) -> None:
        """Record the waiting bytes; call it just before libpq reads."""
        if self._total is None:
            self._waiting = _waiting(self._descriptor)

    def after_read(self) -> int:
        """Return how many bytes libpq has read since the last call."""
        if self._total is None:
            is_large = self._is_one_message and self._waiting >= LARGE_READ
            least = self._waiting // 2 if is_large else min(self._waiting, LEAST_READ)
            return max(self._waiting - _waiting(self._descriptor), least)
        total = _tcp_total(self._descriptor)
        if total is None:  # the connection is closed
            return 0
        read = max(total - self._total, 0)  # less than before if bytes came while the total was read
        self._total += read
        return read


def _waiting(descriptor: int) -> int:
    """Return how many bytes of a socket can be read without waiting."""
    found = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]


def _tcp_total(descriptor: int) -> int | None:
    """Return how many bytes the process has read from a TCP socket; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    info = ctypes.create_string_buffer(BYTES_RECEIVED + 8)
    size = ctypes.c_uint32(len(info))
    failed = _libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < len(info):
        return None
    received: int = struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
    return received - _waiting(descriptor)


_libc = ctypes.CDLL(None)
