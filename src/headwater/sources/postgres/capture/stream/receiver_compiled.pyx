# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""Receiver of a server's frames without the interpreter's lock, so that the server never waits for our Python code.

A socket on the same machine holds some 250 rows: while another thread has the lock, the server would wait. Without this
module, `DirectReceiver` in replication_receiver does the same in Python, with the lock.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pythread cimport (
    PyThread_acquire_lock,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_release_lock,
    PyThread_type_lock,
    NOWAIT_LOCK,
    WAIT_LOCK,
)
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long count, int timeout)
    short POLLIN

cdef extern from "unistd.h" nogil:
    ssize_t read(int fd, void *data, size_t size)
    ssize_t write(int fd, const void *data, size_t size)
    int usleep(unsigned int us)

ctypedef int (*Consume)(void *) noexcept nogil
ctypedef int (*GetCopy)(void *, char **, int) noexcept nogil
ctypedef void (*Release)(void *) noexcept nogil

FORM = 1  # see wire

cdef enum:
    HEAD = 4  # bytes of a frame's length, before it
    ROOM = 4 << 20  # bytes that may wait; past this the server does
    # Between two looks, while frames come: a reader that is woken for each of them takes the server's core away. Far less
    # than it takes to fill the socket.
    PAUSE_US = 30
    # Over TLS the rest of a record may be inside OpenSSL, where no poll sees it: each PQconsumeInput makes room for 8 KiB at
    # least, and a record has 16. So it is asked so often after the socket had nothing more, and no frame came.
    DRAINS = 3
    STATE_OPEN = 1  # the others are what PQgetCopyData said: below zero
    STATE_BROKEN = -3

OPEN, BROKEN = STATE_OPEN, STATE_BROKEN


cdef class Receiver:
    """Receiver: a thread of its own calls `run`, one other thread calls the rest. A byte from socket `wake` wakes `run`;
    `run` writes a byte to socket `news` for new frames."""

    cdef void *_connection
    cdef Consume _consume
    cdef GetCopy _get
    cdef Release _release
    cdef int _socket, _wake, _news
    cdef PyThread_type_lock _lock  # guards the connection and what follows
    cdef char *_frames
    cdef size_t _size, _used
    cdef int _state
    cdef bint _is_awaited, _is_full, _is_stopped

    def __cinit__(self, size_t connection, size_t consume, size_t get, size_t release, int socket, int wake, int news):
        self._connection, self._consume = <void *> connection, <Consume> consume
        self._get, self._release = <GetCopy> get, <Release> release
        self._socket, self._wake, self._news = socket, wake, news
        self._state = STATE_OPEN
        self._lock = PyThread_allocate_lock()
        if self._lock == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._frames)
        if self._lock != NULL:
            PyThread_free_lock(self._lock)

    def run(self):
        """Receive frames until `stop` is called or the stream ends."""
        with nogil:
            self._run()

    cdef void _run(self) noexcept nogil:
        cdef pollfd[2] sockets
        cdef char[64] rest
        cdef bint is_full, has_more
        cdef size_t had
        cdef int left = 0
        sockets[0].fd, sockets[0].events = self._wake, POLLIN
        sockets[1].fd, sockets[1].events, sockets[1].revents = self._socket, POLLIN, 0
        while True:
            PyThread_acquire_lock(self._lock, WAIT_LOCK)
            if (sockets[1].revents or left) and not self._is_stopped and not self._consume(self._connection):
                self._state = STATE_BROKEN
            had = self._used
            self._take()  # also what came before it broke
            has_more = self._used > had
            left = DRAINS if has_more or sockets[1].revents else left - 1 if left else 0
            is_full = self._is_full = self._used >= ROOM
            if self._is_awaited and (self._used or self._state != STATE_OPEN):
                self._is_awaited = False
                write(self._news, b"x", 1)
            if self._state != STATE_OPEN or self._is_stopped:
                PyThread_release_lock(self._lock)
                return
            PyThread_release_lock(self._lock)
            if has_more:
                usleep(PAUSE_US)
            sockets[0].revents = sockets[1].revents = 0
            poll(sockets, 1 if is_full else 2, 0 if left and not is_full else -1)
            if sockets[0].revents:
                read(self._wake, rest, sizeof(rest))

    cdef void _take(self) noexcept nogil:
        cdef char *frame
        cdef char *grown
        cdef int size
        cdef size_t wanted
        while self._used < ROOM:
            size = self._get(self._connection, &frame, 1)
            if size <= 0:
                if size < 0 and self._state == STATE_OPEN:
                    self._state = size
                return
            wanted = self._used + HEAD + size
            if wanted > self._size:
                grown = <char *> realloc(self._frames, 2 * wanted)
                if grown == NULL:
                    self._release(frame)
                    self._state = STATE_BROKEN
                    return
                self._frames, self._size = grown, 2 * wanted
            memcpy(self._frames + self._used, &size, HEAD)
            memcpy(self._frames + self._used + HEAD, frame, size)
            self._used = wanted
            self._release(frame)

    def take(self):
        """Remove and return the received frames, each after its length; whether `run` waits for `wake` because there was
        no room; and the state: OPEN, or that no frame follows these. If there are none, `news` signals the next ones.
        """
        cdef char *frames
        cdef size_t used
        cdef bint was_full
        cdef int state
        self.lock()
        frames, used, was_full, state = self._frames, self._used, self._is_full, self._state
        self._frames, self._size, self._used, self._is_full = NULL, 0, 0, False
        self._is_awaited = not used
        PyThread_release_lock(self._lock)
        try:
            return PyBytes_FromStringAndSize(frames, used), was_full, state
        finally:
            free(frames)

    def stop(self):
        """Make `run` return once it is woken."""
        self._is_stopped = True

    def lock(self):
        """Keep `run` from using the connection until `unlock`; wait while it does."""
        if not PyThread_acquire_lock(self._lock, NOWAIT_LOCK):
            with nogil:
                PyThread_acquire_lock(self._lock, WAIT_LOCK)

    def unlock(self):
        """Let `run` use the connection again."""
        PyThread_release_lock(self._lock)
