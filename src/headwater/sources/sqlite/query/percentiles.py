"""Python versions of median(), percentile(), percentile_cont() and percentile_disc().

SQLite sorts all values of these aggregates in one step, which no time limit interrupts, by a quicksort that is
quadratic on chosen input. Nothing limits the number of values of the built-in functions, so we always replace them.
Our versions sort the values in short runs, and check the clock between two runs.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from contextlib import closing
from typing import Any

import apsw

RUN = 1 << 15  # values sorted at once, in about 10 ms
FEW = 8  # values inserted one by one; more are sorted with the run
CHECKED = 1 << 10  # values between two checks of the clock
_SIGN = 1 << 63
_MASK = (1 << 64) - 1

Check = Callable[[], None]


class SortedRuns:
    """Multiset of numbers with lookup by sorted position; `check` raises once the time is up."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._runs: list[array[float]] = []  # each run is sorted; the last one may grow
        self._fresh = array("d")  # not sorted yet
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, number: float) -> None:
        """Add a number; check the time now and then."""
        self._fresh.append(number)
        self._count += 1
        if self._count % CHECKED == 0:
            self._check()
        if len(self._fresh) >= RUN:
            self._sort()

    def remove(self, number: float) -> None:
        """Remove one occurrence of a number; do nothing if there is none."""
        self._sort()
        for place, run in enumerate(self._runs):
            found = bisect_left(run, number)
            if found < len(run) and run[found] == number:
                del run[found]
                self._count -= 1
                if not run:
                    del self._runs[place]
                return

    def at(self, place: int) -> float:
        """Return the number at position `place` in ascending order, from zero."""
        self._sort()
        if len(self._runs) == 1:
            return self._runs[0][place]
        low, high = min(_rank(run[0]) for run in self._runs), max(_rank(run[-1]) for run in self._runs)
        while low < high:  # finds the lowest number with more than `place` numbers at or below it
            self._check()
            middle = (low + high) // 2
            number = _number(middle)
            if sum(bisect_right(run, number) for run in self._runs) > place:
                high = middle
            else:
                low = middle + 1
        return _number(low)

    def _sort(self) -> None:
        fresh = self._fresh
        if not fresh:
            return
        self._check()
        last = self._runs[-1] if self._runs else None
        if last is None or len(last) + len(fresh) > RUN:
            self._runs.append(array("d", sorted(fresh)))
        elif len(fresh) <= FEW:
            for number in fresh:
                insort(last, number)
        else:
            self._runs[-1] = array("d", sorted(last + fresh))
        self._fresh = array("d")


def _rank(number: float) -> int:
    """Return an integer that sorts like the number; 0.0 and -0.0 give the same integer."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", number + 0.0))
    return int(bits ^ _MASK if bits & _SIGN else bits | _SIGN)


def _number(rank: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<Q", rank ^ _SIGN if rank & _SIGN else rank ^ _MASK))
    return float(number)


class _Percentile:
    """State of one aggregate or window of percentile(Y, P) or a related function."""

    def __init__(self, name: str, check: Check) -> None:
        self._name = name
        self._argument: Any = None
        self._fraction: float | None = 0.5 if name == "median" else None
        self._numbers = SortedRuns(check)

    def step(self, value: Any, *rest: Any) -> None:
        if rest:
            self._set_fraction(rest[0])
        if value is None:
            return
        if not isinstance(value, int | float):
            raise apsw.SQLError(f"input to {self._name}() is not numeric")
        number = float(value)
        if number - number != 0:
            raise apsw.SQLError(f"Inf input to {self._name}()")
        self._numbers.add(number)

    def inverse(self, value: Any, *rest: Any) -> None:
        if isinstance(value, int | float):
            self._numbers.remove(float(value))

    def value(self) -> float | None:
        numbers, fraction = self._numbers, self._fraction
        if not numbers or fraction is None:
            return None
        place = fraction * (len(numbers) - 1)
        whole = int(place)
        low = numbers.at(whole)
        if self._name == "percentile_disc":
            return low
        high = low if place == whole or whole == len(numbers) - 1 else numbers.at(whole + 1)
        return low + (high - low) * (place - whole)

    final = value

    def _set_fraction(self, argument: Any) -> None:
        if self._fraction is not None and argument == self._argument and type(argument) is type(self._argument):
            return
        fraction = _to_fraction(self._name, argument)
        if self._fraction is None:
            self._fraction, self._argument = fraction, argument
        elif not -0.001 <= self._fraction - fraction <= 0.001:
            raise apsw.SQLError(f"the fraction argument to {self._name}() is not the same for all input rows")


def replace_percentiles(db: apsw.Connection, check: Check) -> None:
    """Replace the built-in percentile functions of a connection; `check` raises once a statement's time is up."""
    for name, arguments in (("median", 1), ("percentile", 2), ("percentile_cont", 2), ("percentile_disc", 2)):
        db.create_window_function(
            name,
            lambda name=name: _Percentile(name, check),  # type: ignore[misc]
            arguments,
            flags=apsw.SQLITE_INNOCUOUS | apsw.SQLITE_DETERMINISTIC,
        )


def _to_fraction(name: str, argument: Any) -> float:
    """Return the second argument as a fraction of one, converted and checked as SQLite does."""
    most = 100.0 if name == "percentile" else 1.0
    number = _numeric(argument)
    if number is None or not 0.0 <= number / most <= 1.0:
        raise apsw.SQLError(f"the fraction argument to {name}() is not between 0.0 and {most:.1f}")
    return number / most


def _numeric(argument: Any) -> float | None:
    if isinstance(argument, int | float):
        return float(argument)
    if not isinstance(argument, str) or len(argument) > 100:
        return None
    with closing(apsw.Connection(":memory:")) as db:
        db.execute("CREATE TABLE n(v NUMERIC)")
        db.execute("INSERT INTO n VALUES (?)", (argument,))
        ((found,),) = db.execute("SELECT v FROM n").fetchall()
    return float(found) if isinstance(found, int | float) else None
