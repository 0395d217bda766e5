# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, embedsignature=True
"""Changes by column, compiled: the twin of `columns`, which says what it does. Built where there is a compiler
(`hatch_build.py`); nothing but speed is lost without."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM

FORM = 1  # see columns


def columns(tuple changes not None):
    """See there."""
    cdef Py_ssize_t count = PyTuple_GET_SIZE(changes)
    cdef Py_ssize_t place
    cdef bytes ops = PyBytes_FromStringAndSize(NULL, count)
    cdef char *op = PyBytes_AS_STRING(ops)
    cdef tuple before = PyTuple_New(count)
    cdef tuple after = PyTuple_New(count)
    cdef list shapes = []
    cdef list tables = []
    cdef dict places = {}  # by identity: hashing a Table walks all its columns
    cdef dict remarks = {}
    cdef object last = None
    cdef object shape = 0
    cdef bint is_plain = True
    for place in range(count):
        change = <object> PyTuple_GET_ITEM(changes, place)
        op[place] = <char> <int> change.op
        table = change.table
        if table is not last:
            last = table
            shape = places.get(id(table))
            if shape is None:
                if len(tables) == 1:
                    shapes = [0] * place  # so far there was one, and its place need not be written
                shape = places[id(table)] = len(tables)
                tables.append(table)
        if len(tables) > 1:
            shapes.append(shape)
        row = change.before
        is_plain = is_plain and _is_plain(row)
        Py_INCREF(row)
        PyTuple_SET_ITEM(before, place, row)
        row = change.after
        is_plain = is_plain and _is_plain(row)
        Py_INCREF(row)
        PyTuple_SET_ITEM(after, place, row)
        ddl, resnapshot = change.ddl, change.resnapshot
        if ddl is not None or resnapshot:
            remarks[place] = (ddl, resnapshot)
    return ops, shapes, tuple(tables), before, after, remarks, is_plain


cdef bint _is_plain(row):
    if row is None:
        return True
    if type(row) is not tuple:
        return False
    cdef Py_ssize_t place
    for place in range(PyTuple_GET_SIZE(<tuple> row)):
        value = <object> PyTuple_GET_ITEM(<tuple> row, place)
        kind = type(value)
        if kind is str or kind is int or value is None or kind is float or kind is bool or kind is bytes:
            continue
        return False
    return True
