# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The cells of an answer as columns, compiled: the twin of `cells.in_python`, which says what it does. Built where there
is a compiler (`hatch_build.py`); nothing but speed is lost without. The interpreter's lock is not held meanwhile."""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from libc.limits cimport INT_MAX
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

ctypedef char *(*GetValue)(const void *, int, int) noexcept nogil
ctypedef int (*Get)(const void *, int, int) noexcept nogil

FORM = 1  # see cells

cdef enum:
    NULL_WEIGHT = 8


def columns(size_t result, int rows, int width, size_t get_value, size_t get_length, size_t get_is_null):
    """Of each column which cells are there (bits; None where all are), where each begins, and their bytes. Then the
    weight of all, and of the heaviest row. A column of 2 GiB or more is an OverflowError."""
    cdef const void *answer = <const void *> result
    cdef Get length = <Get> get_length
    cdef Get is_null = <Get> get_is_null
    cdef bytearray weights = PyByteArray_FromStringAndSize(NULL, (rows + 1) * sizeof(int64_t))
    cdef int64_t *weight = <int64_t *> PyByteArray_AS_STRING(weights)
    cdef int64_t total = 0
    cdef int64_t heaviest = 0
    cdef int row, place
    memset(weight, 0, (rows + 1) * sizeof(int64_t))
    found = [_column(answer, rows, place, <GetValue> get_value, length, is_null, weight) for place in range(width)]
    for row in range(rows):
        total += weight[row]
        heaviest = max(heaviest, weight[row])
    return found, total, heaviest


cdef tuple _column(
    const void *answer, int rows, int place, GetValue value, Get length, Get is_null, int64_t *weight
):
    cdef bytearray there = PyByteArray_FromStringAndSize(NULL, (rows + 7) // 8)
    cdef bytearray begins = PyByteArray_FromStringAndSize(NULL, (rows + 1) * sizeof(int32_t))
    cdef unsigned char *bits = <unsigned char *> PyByteArray_AS_STRING(there)
    cdef int32_t *begin = <int32_t *> PyByteArray_AS_STRING(begins)
    cdef int64_t end = 0
    cdef int nulls = 0
    cdef int row, size
    cdef bytearray data
    cdef char *at
    with nogil:
        memset(bits, 0, (rows + 7) // 8)
        begin[0] = 0
        for row in range(rows):
            size = length(answer, row, place)
            if size == 0 and is_null(answer, row, place):
                nulls += 1
                weight[row] += NULL_WEIGHT
            else:
                bits[row >> 3] |= 1 << (row & 7)
                weight[row] += size
                end += size
                if end > INT_MAX:
                    break
            begin[row + 1] = <int32_t> end
    if end > INT_MAX:
        raise OverflowError
    data = PyByteArray_FromStringAndSize(NULL, end)
    at = PyByteArray_AS_STRING(data)
    with nogil:
        for row in range(rows):
            memcpy(at + begin[row], value(answer, row, place), begin[row + 1] - begin[row])
    return (there if nulls else None), begins, data
