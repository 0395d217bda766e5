"""The two ends of a pipe between a gRPC client and the gRPC library, with backpressure in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headwater.model.work.usage import Usage
from headwater.serve.grpc.connections.http2_frames import Http2Frames, RefusedFrame
from headwater.serve.limits.rates import place_of
from headwater.serve.limits.slow_reader_limits import PROGRESS, STALL_SECONDS

CLIENT_BYTES = 64 << 10  # read at a time: 7,000 empty frames, which take about 3 ms to check
LIBRARY_BYTES = 128 << 10  # took less CPU than 64 and 256 KiB
FRAMES_PER_SECOND = 50_000  # of connections from one address that send more; a call with one answer has about three
MAX_AHEAD = 0.02  # seconds by which a connection may be ahead of that rate: 1,000 frames
CLOSE_SECONDS = 10.0  # for a client to read the last bytes after the library has closed the connection


class Shared:
    """Read buffers and slowed-down connections of one event loop."""

    def __init__(self) -> None:
        self.of_clients = memoryview(bytearray(CLIENT_BYTES))  # its bytes are copied before the next read
        self.of_library = memoryview(bytearray(LIBRARY_BYTES))
        self.slowed: Usage[str] = Usage()  # connections that send too many frames, by the place of their address


class _End(asyncio.BufferedProtocol):
    """One end of the pipe: writes received bytes to the other end, and reads only while that accepts them."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._is_held = False  # the other end takes no more
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: Any) -> None:
        """Remember the transport."""
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer into which the next bytes are read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Write the received bytes to the other end."""
        self._pass(bytes(self._buffer[:nbytes]))

    def _pass(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """Stop reading at the other end."""
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        """Resume reading at the other end."""
        if self.other is not None:
            self.other.release()

    def hold(self) -> None:
        """Read nothing until `release`."""
        self._is_held = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def release(self) -> None:
        """Read again."""
        self._is_held = False
        self._read_on()

    def _read_on(self) -> None:
        if not self._is_held and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()


class ClientEnd(_End):
    """The end of a client, whose frames are checked. `lost` is called when the connection has ended.

    A client that reads almost nothing for `stall_seconds`, while bytes wait for it, is closed. A client that sends more
    than FRAMES_PER_SECOND, divided by the connections of its address that do so, is read at that rate.
    """

    def __init__(
        self,
        shared: Shared,
        accepted: Callable[[ClientEnd], None],
        refused: Callable[[ClientEnd, str], None],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        super().__init__(shared.of_clients)
        self.shared, self._accepted, self._refused = shared, accepted, refused
        self._stall_seconds = stall_seconds
        self._unread: int | None = None  # bytes that waited for the client at `_since`; None if it reads
        self._since = 0.0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._frames = Http2Frames()
        self._due = 0.0  # when the frames received so far would have been received at the permitted rate
        self._slow_timer: asyncio.TimerHandle | None = None  # until it, nothing is read
        self._early = b""
        self._timer: asyncio.TimerHandle | None = None
        self.address = self._place = self.name = ""  # `name` is that of the socket to the library
        self.lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: Any) -> None:
        """Report the client as accepted; bytes received before the other end exists are kept for it."""
        super().connection_made(transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._place = place_of(self.address)
        self._is_held = True
        self._accepted(self)

    def _pass(self, data: bytes) -> None:
        try:
            frames = self._frames.check(data)
        except RefusedFrame as refusal:
            self._refused(self, str(refusal))
            self.abort()
            return
        if self.other is None:
            self._early += data
            self.hold()  # uvloop starts to read after connection_made, whatever was said there
        else:
            super()._pass(data)
        self._slow_down(frames)

    def _slow_down(self, frames: int) -> None:
        """Read nothing for a while if `frames` more frames exceed the rate."""
        loop = asyncio.get_running_loop()
        rate = FRAMES_PER_SECOND / (1 + self.shared.slowed[self._place])
        self._due = max(self._due, loop.time()) + frames / rate
        delay = self._due - loop.time()
        if delay > MAX_AHEAD and self._slow_timer is None:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.pause_reading()
            self.shared.slowed.add(self._place)
            self._slow_timer = loop.call_later(delay, self._speed_up)

    def _speed_up(self) -> None:
        self._slow_timer = None
        self.shared.slowed.remove(self._place)
        self._read_on()

    def _read_on(self) -> None:
        if self._slow_timer is None:
            super()._read_on()

    def pause_writing(self) -> None:
        """Stop reading at the other end, and start to measure whether the client reads."""
        super().pause_writing()
        self._measure()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = None

    def _measure(self) -> None:
        if self.transport is not None:
            loop = asyncio.get_running_loop()
            self._unread, self._since = self.transport.get_write_buffer_size(), loop.time()
            if self._stall_timer is None:  # one timer for any number of pauses
                self._stall_timer = loop.call_later(self._stall_seconds, self._check_stall)

    def _check_stall(self) -> None:
        self._stall_timer = None
        if self._unread is None or self.transport is None:
            return
        loop = asyncio.get_running_loop()
        left = self._since + self._stall_seconds - loop.time()
        if left > 0:
            self._stall_timer = loop.call_later(left, self._check_stall)
        elif self._unread - self.transport.get_write_buffer_size() >= PROGRESS:
            self._measure()
        else:
            self._refused(self, f"it has left its answers unread for {self._stall_seconds:g} s")
            self.abort()

    def join(self, other: LibraryEnd) -> None:
        """Set the other end, write to it the bytes received so far, and read again."""
        self.other = other
        early, self._early = self._early, b""
        super()._pass(early)
        self.release()

    def eof_received(self) -> bool:
        """Pass the end of the client's data to the library, which may still answer; with TLS, close the connection."""
        assert self.transport is not None
        if self.other is None or self.other.transport is None or not self.transport.can_write_eof():
            return False  # the transport closes itself
        if not self.other.transport.is_closing():
            self.other.transport.write_eof()
        return True

    @property
    def has_nothing_unsent(self) -> bool:
        """Return whether no bytes wait for the client."""
        return self.transport is not None and not self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection once the client has received what was sent, at the latest in CLOSE_SECONDS."""
        if self.transport is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.abort)
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end and call `lost`."""
        for timer in (self._timer, self._stall_timer, self._slow_timer):
            if timer is not None:
                timer.cancel()
        if self._slow_timer is not None:
            self._speed_up()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()
        self.transport = self.other = None
        self.lost()


class LibraryEnd(_End):
    """The end of the gRPC library, which never half-closes a connection."""

    def __init__(self, client: ClientEnd) -> None:
        super().__init__(client.shared.of_library)
        self.other: _End | None = client

    def connection_made(self, transport: Any) -> None:
        """Start to read at both ends; close the connection if the client has disconnected."""
        super().connection_made(transport)
        if isinstance(self.other, ClientEnd) and self.other.transport is not None:
            self.other.join(self)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the connection of the client."""
        client, self.transport, self.other = self.other, None, None
        if isinstance(client, ClientEnd):
            client.other = None
            client.close()
