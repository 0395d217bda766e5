# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, embedsignature=True
"""Row messages to changes, compiled: the faster twin of `row_decoder_python`, which explains the work. `hatch_build.py`
builds it if a compiler is available.

Rows are read in libpq's buffer. A message that cannot be read here goes to the plan's careful decoder.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_FromDouble
from cpython.list cimport PyList_GET_SIZE
from cpython.long cimport PyLong_FromLongLong
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcmp, memcpy

from headwater.model.change import Change as _Change
from headwater.model.change import Op
from headwater.model.literal import UNAVAILABLE
from headwater.sources.postgres.capture.decode.replication_frames import DATA as _DATA
from headwater.sources.postgres.capture.decode.replication_frames import DATA_HEAD as _DATA_HEAD
from headwater.sources.postgres.capture.decode.row_plan import ERRORS as _ERRORS
from headwater.sources.postgres.capture.decode.row_plan import HEAD as _HEAD

cdef extern from "Python.h":
    double PyOS_string_to_double(const char *text, char **end, PyObject *overflow) except? -1.0
    void PyObject_GC_UnTrack(PyObject *)

FORM = 2  # see row_plan

cdef object Change = _Change
cdef object unavailable = UNAVAILABLE
cdef tuple ERRORS = _ERRORS
cdef Py_ssize_t DATA_HEAD = _DATA_HEAD
cdef Py_ssize_t HEAD = _HEAD
cdef unsigned char DATA = _DATA

cdef enum Kind:
    BY_CALL, I64, F64, STR, BOOL

cdef dict KINDS = {"i64": I64, "f64": F64, "str": STR, "bool": BOOL}

cdef struct Text:  # of a value in the message; NULL where it has none
    const unsigned char *at
    Py_ssize_t size

cdef enum:
    LONGEST_FLOAT = 64
    FRAME_HEAD = 4


class _Unread(ValueError):
    """A message that the careful decoder must read."""


cdef object _unread = _Unread()


cdef class Decoder:
    """Decoder of the messages that its plan describes. For one thread."""

    cdef object op, table, careful
    cdef tuple converts
    cdef Py_ssize_t width
    cdef unsigned char old_mark  # of the old row; 0 where none is sent
    cdef bint has_new, key_from_new
    cdef Kind *kinds
    cdef bint *known
    cdef Text *texts  # of the old row

    def __cinit__(self, plan):
        self.width = len(plan.converts)
        self.kinds = <Kind *> PyMem_Malloc((self.width + 1) * sizeof(Kind))
        self.known = <bint *> PyMem_Malloc((self.width + 1) * sizeof(bint))
        self.texts = <Text *> PyMem_Malloc((self.width + 1) * sizeof(Text))
        if not self.kinds or not self.known or not self.texts:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.kinds)
        PyMem_Free(self.known)
        PyMem_Free(self.texts)

    def __init__(self, plan):
        self.op, self.table, self.careful, self.converts = plan.op, plan.table, plan.careful, plan.converts
        self.old_mark = {"new": 0, "key": c"K", "all": c"O"}[plan.sent]
        self.has_new = plan.op is not Op.DELETE
        self.key_from_new = plan.op is Op.UPDATE and plan.sent == "new"
        if not len(plan.table.columns) == len(plan.known) == len(plan.converts) == self.width:
            raise ValueError("a plan has one converter and one mark for each column")  # there is room for so many
        for place, column in enumerate(plan.table.columns):
            self.kinds[place] = KINDS.get(column.kind, BY_CALL)
        for place, is_known in enumerate(plan.known):
            self.known[place] = is_known

    def __call__(self, bytes message not None):
        return self.decode(<const unsigned char *> PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message))

    cdef object decode(self, const unsigned char *message, Py_ssize_t size):
        """Return the change in the message at `message`."""
        try:
            return self._decode(message, size)
        except ERRORS:
            return self.careful(PyBytes_FromStringAndSize(<const char *> message, size))

    cdef object _decode(self, const unsigned char *message, Py_ssize_t size):
        cdef const unsigned char *at = message + 5
        cdef const unsigned char *end = message + size
        cdef tuple old = None
        cdef tuple new = None
        if self.old_mark:
            old = self._old(&at, end)
        if self.has_new:
            new = self._new(&at, end, old)
        if at != end:
            raise _unread
        if self.key_from_new:
            old = self._key_of(new)
        return Change(self.op, self.table, old, new)

    cdef int _begin(self, const unsigned char **at, const unsigned char *end, unsigned char mark) except -1:
        """Skip the mark of a row and its number of values; raise _Unread if either differs from the plan."""
        cdef const unsigned char *row = at[0]
        if end - row < 3 or row[0] != mark or (row[1] << 8 | row[2]) != self.width:
            raise _unread
        at[0] = row + 3
        return 0

    cdef tuple _old(self, const unsigned char **at, const unsigned char *end):
        cdef tuple row = PyTuple_New(self.width)
        cdef Py_ssize_t place
        cdef object value
        cdef unsigned char mark
        cdef Text *text
        self._begin(at, end, self.old_mark)
        for place in range(self.width):
            text = &self.texts[place]
            mark = _next(at, end, text)
            if mark == c"u" or not self.known[place]:
                value = unavailable
            elif mark == c"n":
                value = None
            else:
                value = self._value(place, text)
            Py_INCREF(value)
            PyTuple_SET_ITEM(row, place, value)
        PyObject_GC_UnTrack(<PyObject *> row)  # values are leaves: no circle goes through a row
        return row

    cdef tuple _new(self, const unsigned char **at, const unsigned char *end, tuple old):
        cdef tuple row = PyTuple_New(self.width)
        cdef Py_ssize_t place
        cdef object value
        cdef unsigned char mark
        cdef bint is_shared
        cdef Text text
        cdef Text *was
        self._begin(at, end, c"N")
        for place in range(self.width):
            mark = _next(at, end, &text)
            is_shared = old is not None and self.known[place]
            was = &self.texts[place]
            if mark == c"n":
                value = None
            elif mark == c"u":
                value = <object> PyTuple_GET_ITEM(old, place) if is_shared else unavailable
            elif is_shared and was.at and was.size == text.size and not memcmp(was.at, text.at, text.size):
                value = <object> PyTuple_GET_ITEM(old, place)  # most values of an update are the old ones
            else:
                value = self._value(place, &text)
            Py_INCREF(value)
            PyTuple_SET_ITEM(row, place, value)
        PyObject_GC_UnTrack(<PyObject *> row)
        return row

    cdef tuple _key_of(self, tuple row):
        """Return the old row as far as the new row shows it: its key, with the other columns unavailable."""
        cdef tuple found = PyTuple_New(self.width)
        cdef Py_ssize_t place
        cdef object value
        for place in range(self.width):
            value = <object> PyTuple_GET_ITEM(row, place) if self.known[place] else unavailable
            Py_INCREF(value)
            PyTuple_SET_ITEM(found, place, value)
        PyObject_GC_UnTrack(<PyObject *> found)
        return found

    cdef object _value(self, Py_ssize_t place, const Text *text):
        cdef Kind kind = self.kinds[place]
        if kind == STR:
            return PyUnicode_DecodeUTF8(<const char *> text.at, text.size, NULL)
        if kind == I64:
            return _integer(text)
        if kind == F64:
            return _float(text)
        if kind == BOOL:
            if text.size == 1 and (text.at[0] == c"t" or text.at[0] == c"f"):
                return text.at[0] == c"t"
            raise _unread
        return (<object> PyTuple_GET_ITEM(self.converts, place))(
            PyUnicode_DecodeUTF8(<const char *> text.at, text.size, NULL)
        )


cdef unsigned char _next(const unsigned char **at, const unsigned char *end, Text *text) except 0:
    """Return the mark of the next value, and set `text` to its text, if it has one."""
    cdef const unsigned char *head = at[0]
    cdef Py_ssize_t size
    if head >= end:
        raise _unread
    if head[0] == c"t":
        if end - head < 5:
            raise _unread
        size = <Py_ssize_t> (<unsigned int> head[1] << 24 | head[2] << 16 | head[3] << 8 | head[4])
        if size > end - head - 5:
            raise _unread
        text.at, text.size = head + 5, size
        at[0] = head + 5 + size
    elif head[0] == c"n" or head[0] == c"u":
        text.at, text.size = NULL, 0
        at[0] = head + 1
    else:
        raise _unread
    return head[0]


cdef object _integer(const Text *text):
    cdef const unsigned char *at = text.at
    cdef const unsigned char *end = at + text.size
    cdef bint is_negative = at < end and at[0] == c"-"
    cdef long long number = 0
    at += is_negative
    if at == end or end - at > 18:
        return int(PyBytes_FromStringAndSize(<const char *> text.at, text.size))
    while at < end:
        if not c"0" <= at[0] <= c"9":
            return int(PyBytes_FromStringAndSize(<const char *> text.at, text.size))
        number = number * 10 + (at[0] - c"0")
        at += 1
    return PyLong_FromLongLong(-number if is_negative else number)


cdef object _float(const Text *text):
    cdef char[LONGEST_FLOAT] copy
    cdef char *end
    cdef double number
    if not 0 < text.size < LONGEST_FLOAT:
        raise _unread
    memcpy(copy, text.at, text.size)
    copy[text.size] = 0
    number = PyOS_string_to_double(copy, &end, NULL)
    if end != copy + text.size:
        raise _unread
    return PyFloat_FromDouble(number)


cdef class Frames:
    """Frames of a connection, from chunks of frames that follow their length; an empty chunk means none for now."""

    cdef object refill
    cdef bytes chunk
    cdef const unsigned char *at
    cdef const unsigned char *end

    def __init__(self, refill):
        self.refill, self.chunk = refill, b""
        self.at = self.end = NULL

    def __call__(self, wait=1):
        """Return the next frame, as `Get` does."""
        cdef const unsigned char *frame = NULL
        cdef Py_ssize_t size = self.next(&frame)
        return size, memoryview(PyBytes_FromStringAndSize(<const char *> frame, size))

    cdef Py_ssize_t next(self, const unsigned char **frame) except -1:
        cdef unsigned int size
        if self.at == self.end:
            self.chunk = self.refill()
            self.at = <const unsigned char *> PyBytes_AS_STRING(self.chunk)
            self.end = self.at + PyBytes_GET_SIZE(self.chunk)
            if self.at == self.end:
                return 0
        memcpy(&size, self.at, FRAME_HEAD)
        frame[0] = self.at + FRAME_HEAD
        self.at += FRAME_HEAD + size
        return size


def take(get, dict rows not None, list changes not None, Py_ssize_t most, Py_ssize_t most_bytes):
    """Read row frames into `changes` until another frame or a limit; see Take."""
    cdef Frames frames = get if type(get) is Frames else None
    cdef Py_ssize_t taken = 0
    cdef Py_ssize_t size
    cdef object decoder = None
    cdef object frame = None
    cdef tuple got
    cdef bytes head = None
    cdef Py_buffer view
    cdef const unsigned char *message = NULL
    while True:
        if frames is None:
            got = get(1)
            size, frame = got
            if size > 0:
                PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
                message = <const unsigned char *> view.buf
                PyBuffer_Release(&view)  # `frame` keeps it where it is
                if view.len != size:
                    return size, frame, taken
        else:
            size = frames.next(&message)
        if size >= DATA_HEAD + HEAD and message[0] == DATA and PyList_GET_SIZE(changes) < most and taken < most_bytes:
            message += DATA_HEAD
            if head is None or memcmp(message, PyBytes_AS_STRING(head), HEAD):
                head = PyBytes_FromStringAndSize(<const char *> message, HEAD)
                decoder = rows.get(head)
            if type(decoder) is Decoder:
                changes.append((<Decoder> decoder).decode(message, size - DATA_HEAD))
                taken += size - DATA_HEAD
                continue
            if decoder is not None:
                changes.append(decoder(PyBytes_FromStringAndSize(<const char *> message, size - DATA_HEAD)))
                taken += size - DATA_HEAD
                continue
            message -= DATA_HEAD
        if frames is not None:
            frame = memoryview(PyBytes_FromStringAndSize(<const char *> message, size))
        return size, frame, taken
