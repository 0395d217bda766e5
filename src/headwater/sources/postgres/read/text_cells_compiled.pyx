# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The cells of an answer as columns, compiled: the faster twin of `text_cells.in_python`. `hatch_build.py` builds it if
a compiler is available. Cells are copied without the interpreter's lock."""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from libc.limits cimport INT_MAX
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

ctypedef char *(*GetValue)(const void *, int, int) noexcept nogil
ctypedef int (*Get)(const void *, int, int) noexcept nogil

FORM = 1  # see cells

cdef enum:
    NULL_WEIGHT = 8

cdef struct Column:
    unsigned char *there  # a bit for each cell that is no NULL
    int32_t *begins
    char *data
    int64_t end
    bint has_nulls


cdef class Weights:
    """Bytes of all rows, and of the largest row."""

    cdef int64_t total, heaviest


def columns(size_t result, int rows, int width, size_t get_value, size_t get_length, size_t get_is_null):
    """Return, for each column, the bits of its cells that are not NULL (None if all are not), the starts and the bytes
    of its cells; then the bytes of all rows, and of the largest. OverflowError for a column of 2 GiB or more."""
    cdef const void *answer = <const void *> result
    cdef Weights weights = Weights()
    cdef Column *found = <Column *> calloc(width + 1, sizeof(Column))
    cdef Column *column
    cdef int place
    cdef bint fits
    if found == NULL:
        raise MemoryError
    try:
        there = [PyByteArray_FromStringAndSize(NULL, (rows + 7) // 8) for _ in range(width)]
        begins = [PyByteArray_FromStringAndSize(NULL, (rows + 1) * sizeof(int32_t)) for _ in range(width)]
        for place in range(width):
            column = &found[place]
            column.there = <unsigned char *> PyByteArray_AS_STRING(there[place])
            column.begins = <int32_t *> PyByteArray_AS_STRING(begins[place])
            memset(column.there, 0, (rows + 7) // 8)
            column.begins[0] = 0
        with nogil:
            fits = _measure(answer, rows, width, found, <Get> get_length, <Get> get_is_null, weights)
        if not fits:
            raise OverflowError
        data = [PyByteArray_FromStringAndSize(NULL, found[place].end) for place in range(width)]
        for place in range(width):
            found[place].data = PyByteArray_AS_STRING(data[place])
        with nogil:
            _copy(answer, rows, width, found, <GetValue> get_value)
        bits = [there[place] if found[place].has_nulls else None for place in range(width)]
        return list(zip(bits, begins, data)), weights.total, weights.heaviest
    finally:
        free(found)


# Row by row, as libpq keeps them: column by column it takes half as long again.

cdef bint _measure(
    const void *answer, int rows, int width, Column *found, Get length, Get is_null, Weights weights
) noexcept nogil:
    """Find where each cell begins; return False if a column is too large."""
    cdef Column *column
    cdef int row, place, size
    cdef int64_t weight
    for row in range(rows):
        weight = 0
        for place in range(width):
            column = &found[place]
            size = length(answer, row, place)
            if size == 0 and is_null(answer, row, place):
                column.has_nulls = True
                weight += NULL_WEIGHT
            else:
                column.there[row >> 3] |= 1 << (row & 7)
                column.end += size
                weight += size
                if column.end > INT_MAX:
                    return False
            column.begins[row + 1] = <int32_t> column.end
        weights.total += weight
        if weight > weights.heaviest:
            weights.heaviest = weight
    return True


cdef void _copy(const void *answer, int rows, int width, Column *found, GetValue value) noexcept nogil:
    cdef Column *column
    cdef int row, place, begin
    for row in range(rows):
        for place in range(width):
            column = &found[place]
            begin = column.begins[row]
            memcpy(column.data + begin, value(answer, row, place), column.begins[row + 1] - begin)
