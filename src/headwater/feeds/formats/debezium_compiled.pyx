# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, embedsignature=True
"""The compiled encoder of Debezium's envelope, which writes the same bytes as `debezium` does in Python. Built where
there is a compiler (`hatch_build.py`); without it only speed is lost.

Plain values are written in place. Other values (texts with escapes, long floats, dates, decimals, …) are written by the
plan's form, as in Python.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_Clear
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.math cimport fabs, llround
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

from headwater.model.change import Op
from headwater.model.literal import EXACT_JSON_INT, UNAVAILABLE

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size)
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

FORM = 2  # see envelope

cdef object unavailable = UNAVAILABLE
cdef long long EXACT = EXACT_JSON_INT
cdef int INSERT = Op.INSERT
cdef int DELETE = Op.DELETE
cdef int SCHEMA_CHANGE = Op.SCHEMA_CHANGE
cdef tuple WORDS = (b"", *[op.word.encode() for op in Op])
cdef const char *LETTERS = b"?cud?t"  # by number

cdef enum:
    NUMBER = 24  # bytes of the longest number, with quotes
    SMALLEST = 1024


cdef class Plan:
    """The parts that all changes of one version of a table have in common."""

    cdef object around
    cdef dict form
    cdef bint before, after
    cdef tuple columns, keys  # the bytes before each value
    cdef Py_ssize_t *places  # indexes in a row: of the columns, then of the keys
    # The `_facts` of the newest part and the bytes that its changes share; any thread may replace it, as one object. The
    # part itself is not stored: a plan is cached, and would keep all rows of the part in memory.
    cdef tuple shared

    def __cinit__(self, plan):
        self.places = <Py_ssize_t *> PyMem_Malloc((len(plan.columns) + len(plan.keys) + 1) * sizeof(Py_ssize_t))
        if not self.places:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.places)

    def __init__(self, plan):
        self.around, self.form, self.before, self.after = plan.around, plan.form, plan.before, plan.after
        self.columns = tuple([name for name, _ in plan.columns])
        self.keys = tuple([name for name, _ in plan.keys])
        self.shared = (None, b"", b"", b"")
        for at, (_, place) in enumerate((*plan.columns, *plan.keys)):
            self.places[at] = place

    def change(self, part, Py_ssize_t offset, change, int op):
        """Return the envelope of one change, which is not a schema change."""
        cdef Frames out = Frames(None, None, None, 1, 0)
        self.write(out, part, _facts(part), offset, change, op)
        return out.data()

    cdef int write(self, Frames out, part, tuple facts, Py_ssize_t offset, change, int op) except -1:
        cdef object before = None if op == INSERT else change.before
        cdef object after = None if op == DELETE else change.after
        cdef object row = before if after is None else after
        cdef tuple shared = self.shared
        known = <object> PyTuple_GET_ITEM(shared, 0)
        if known is not facts and known != facts:
            self.shared = shared = (facts, *self.around(part))
        out.put(b'{"before":', 10)
        self.image(out, before if self.before else None)
        out.put(b',"after":', 9)
        self.image(out, after if self.after else None)
        out.text(<object> PyTuple_GET_ITEM(shared, 1))
        out.number(offset)
        out.text(<object> PyTuple_GET_ITEM(shared, 2))
        out.number(offset)
        out.put(b'},"op":"', 8)
        out.put(LETTERS + op, 1)
        out.text(<object> PyTuple_GET_ITEM(shared, 3))
        out.number(offset - <Py_ssize_t> (<object> PyTuple_GET_ITEM(facts, 0)) + 1)
        out.put(b"}", 1)
        if row is not None:
            self.key(out, before, row)
        out.put(b"}", 1)
        return 0

    cdef int image(self, Frames out, row) except -1:
        if row is None:
            return out.put(b"null", 4)
        return self.values(out, <tuple?> row, self.columns, self.places)

    cdef int key(self, Frames out, before, row) except -1:
        cdef Py_ssize_t *places = self.places + PyTuple_GET_SIZE(self.columns)
        cdef Py_ssize_t start, middle, end, place
        out.put(b',"key":', 7)
        start = out.size
        self.values(out, <tuple?> row, self.keys, places)
        if before is None or before is row:
            return 0
        middle = out.size
        out.put(b',"key_before":', 14)
        end = out.size
        self.values(out, <tuple?> before, self.keys, places)
        if middle - start == out.size - end and not memcmp(out.at + start, out.at + end, middle - start):
            out.size = middle  # the key did not change
            return 0
        for place in range(PyTuple_GET_SIZE(self.keys)):
            if <object> PyTuple_GET_ITEM(<tuple> before, places[place]) is unavailable:
                out.size = middle
                break
        return 0

    cdef int values(self, Frames out, tuple row, tuple names, Py_ssize_t *places) except -1:
        """Write an object: each of `names` with the value at its index."""
        cdef Py_ssize_t width = PyTuple_GET_SIZE(row)
        cdef Py_ssize_t place
        if not PyTuple_GET_SIZE(names):
            return out.put(b"{}", 2)
        for place in range(PyTuple_GET_SIZE(names)):
            if places[place] >= width:
                raise IndexError("the row is shorter than its table")
            out.text(<object> PyTuple_GET_ITEM(names, place))
            self.value(out, <object> PyTuple_GET_ITEM(row, places[place]))
        return out.put(b"}", 1)

    cdef int value(self, Frames out, value) except -1:
        cdef int overflow = 0
        cdef long long number
        kind = type(value)
        if kind is str:
            if out.string(value):
                return 0
        elif kind is int:
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            if not overflow and -EXACT <= number <= EXACT:
                return out.number(number)
        elif kind is float:
            if out.double(PyFloat_AS_DOUBLE(value)):
                return 0
        elif value is None:
            return out.put(b"null", 4)
        elif value is True:
            return out.put(b"true", 4)
        elif value is False:
            return out.put(b"false", 5)
        return out.text(self.form[kind](value))


cdef class Frames:
    """The framed changes of one page. Not thread-safe."""

    cdef char *at
    cdef readonly Py_ssize_t size
    cdef Py_ssize_t room, limit, most
    cdef readonly Py_ssize_t count  # the number of changes
    cdef readonly Py_ssize_t last  # the offset of the last change
    cdef object find, careful, table
    cdef Plan plan
    cdef bytes id, word, start, end

    def __cinit__(self, *args):
        self.at, self.size, self.room = <char *> PyMem_Malloc(SMALLEST), 0, SMALLEST
        if not self.at:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.at)

    def __init__(self, find, careful, enclosing, Py_ssize_t limit, Py_ssize_t most):
        """`find` returns the Plan of a table; `careful` writes the changes that a plan cannot write."""
        self.find, self.careful, self.limit, self.most = find, careful, limit, most
        if enclosing is not None:
            self.id, self.word, self.start, self.end = enclosing

    def data(self):
        """Return all frames."""
        return PyBytes_FromStringAndSize(self.at, self.size)

    @property
    def is_full(self):
        """Whether the page is full."""
        return self.count >= self.limit or self.size >= self.most

    def take(self, part, list ops not None):
        """Add the changes of `part`, delivered as `ops`, until the page is full, but at least one change.

        Return the number of changes processed, those without an op included.
        """
        cdef tuple changes = part.changes
        cdef tuple facts = _facts(part)
        cdef Py_ssize_t first = part.first
        cdef Py_ssize_t place
        cdef int number
        for place in range(min(len(ops), len(changes))):
            op = ops[place]
            if op is None:
                continue
            number = op
            change = <object> PyTuple_GET_ITEM(changes, place)
            self.last = first + place
            self.count += 1
            if self.id is not None:
                self.text(self.id)
                self.number(self.last)
            if self.word is not None:
                self.text(self.word)
                self.text(<object> PyTuple_GET_ITEM(WORDS, number))
            self.text(self.start)
            if number == SCHEMA_CHANGE:
                self.text(self.careful(part, self.last, change, op))
            else:
                table = change.table
                if table is not self.table:
                    self.table, self.plan = table, self.find(table)
                self.plan.write(self, part, facts, self.last, change, number)
            self.text(self.end)
            if self.count >= self.limit or self.size >= self.most:
                return place + 1
        return len(ops)

    # Writing

    cdef int need(self, Py_ssize_t more) except -1:
        cdef char *grown
        cdef Py_ssize_t room = self.room
        if self.size + more <= room:
            return 0
        while self.size + more > room:
            room *= 2
        grown = <char *> PyMem_Realloc(self.at, room)
        if not grown:
            raise MemoryError
        self.at, self.room = grown, room
        return 0

    cdef inline int put(self, const char *text, Py_ssize_t size) except -1:
        self.need(size)
        memcpy(self.at + self.size, text, size)
        self.size += size
        return 0

    cdef inline int text(self, text) except -1:
        return self.put(PyBytes_AS_STRING(<bytes?> text), PyBytes_GET_SIZE(<bytes> text))

    cdef int number(self, long long number) except -1:
        cdef char[NUMBER] digits
        cdef char *at = digits + NUMBER
        cdef uint64_t left = <uint64_t> -number if number < 0 else <uint64_t> number
        while True:
            at -= 1
            at[0] = <char> (c"0" + left % 10)
            left //= 10
            if not left:
                break
        if number < 0:
            at -= 1
            at[0] = c"-"
        return self.put(at, digits + NUMBER - at)

    cdef bint double(self, double number) except -1:
        """Write `number` if it has few digits, which are then unique and found by trying; otherwise return False."""
        cdef long long scale = 1
        cdef long long whole
        cdef int digits
        if not 1e-3 <= fabs(number) < 1e11:  # excludes zero, too, which has a sign
            return False
        for digits in range(5):
            whole = llround(number * scale)
            if <double> whole / scale == number:
                self._decimal(whole, scale, digits)
                return True
            scale *= 10
        return False

    cdef int _decimal(self, long long whole, long long scale, int digits) except -1:
        cdef long long rest
        cdef int place
        if whole < 0:
            self.put(b"-", 1)
            whole = -whole
        self.number(whole // scale)
        if not digits:
            return self.put(b".0", 2)
        rest = whole % scale
        self.need(digits + 1)
        self.at[self.size] = c"."
        for place in range(digits, 0, -1):
            self.at[self.size + place] = <char> (c"0" + rest % 10)
            rest //= 10
        self.size += digits + 1
        return 0

    cdef bint string(self, text) except -1:
        """Write the text if it is valid and needs no escaping; otherwise return False."""
        cdef Py_ssize_t size = 0
        cdef const char *source = PyUnicode_AsUTF8AndSize(text, &size)
        if not source:
            PyErr_Clear()
            return False
        if not _is_plain(<const unsigned char *> source, size):
            return False
        self.need(size + 2)
        self.at[self.size] = c'"'
        memcpy(self.at + self.size + 1, source, size)
        self.at[self.size + size + 1] = c'"'
        self.size += size + 2
        return True


cdef tuple _facts(part):
    """Return the fields of a part that `around` writes; the first is the offset of its transaction's first change."""
    return (part.first - part.start, part.ts, part.commit_ts_ms, part.id)


cdef bint _is_plain(const unsigned char *at, Py_ssize_t size) noexcept:
    """Return whether JSON needs no escape in the text: no control character, quotation mark or backslash. Checks eight
    bytes at a time."""
    cdef const unsigned char *end = at + size
    cdef uint64_t eight, quotes, slashes, found
    while end - at >= 8:
        memcpy(&eight, at, 8)
        quotes = eight ^ <uint64_t> 0x2222222222222222  # a zero byte where there is a quotation mark
        slashes = eight ^ <uint64_t> 0x5C5C5C5C5C5C5C5C
        found = (eight - <uint64_t> 0x2020202020202020) & ~eight  # the high bit of each control character
        found |= (quotes - <uint64_t> 0x0101010101010101) & ~quotes
        found |= (slashes - <uint64_t> 0x0101010101010101) & ~slashes
        if found & <uint64_t> 0x8080808080808080:
            return False
        at += 8
    while at < end:
        if at[0] < 0x20 or at[0] == c'"' or at[0] == c"\\":
            return False
        at += 1
    return True
