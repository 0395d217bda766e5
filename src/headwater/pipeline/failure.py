"""Errors across Spark: executors attach the full error to the traceback, and the driver restores it.

Spark passes only the text of a traceback from executor to driver, nested inside its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from headwater.client.protocol import error_of
from headwater.errors import HeadwaterError, PipelineError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")

_MARK = "headwater-error: "
_NOTE = re.compile(rf"^.*?{_MARK}(\{{.*\}})\s*$", re.MULTILINE)
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n(?:\s.*\n)+(?P<line>[A-Za-z_][\w.]*(?:: .*)?)$", re.MULTILINE
)
_CLASS = re.compile(r"^\[[A-Z0-9_.]+\] ")
_TASK = re.compile(r"most recent failure: .*?\): (?P<line>.+)")
_PACKAGE = re.compile(r"^(?:[a-z]\w*\.)+(?=[A-Z])")
_LOST = ("ExecutorLostFailure", "Python worker exited unexpectedly", "FetchFailed", "Lost task connection")
# Errors of the driver's own connections to Java, after a line with the class: a task may fail with the same words.
_GONE = re.compile(r"(Py4JNetworkError|ConnectionRefusedError)\n|\w+\n\[CANNOT_OPEN_SOCKET\].*Connection refused")
_LONGEST, _DEEPEST = 500, 20
JAVA, GONE = "java", "gone"  # detail of an error: Spark's Java process has ended


# Executors


def note(error: HeadwaterError) -> HeadwaterError:
    """Return `error` with its code, message and details attached as a note, which tracebacks print."""
    if not any(_MARK in line for line in getattr(error, "__notes__", ())):
        told = {"code": error.code, "message": error.message, "details": error.details}
        if error.hint:
            error.add_note(error.hint)
        error.add_note(_MARK + msgspec.json.encode(told, enc_hook=str).decode())
    return error


def report_errors(act: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that Spark calls in its workers, so that Headwater errors leave it with their note."""

    @wraps(act)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return act(*args, **kwargs)
        except HeadwaterError as error:
            raise note(error)  # noqa: B904 - the same error

    return call


def report_generator_errors(act: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorate a generator that Spark runs in its workers, so that Headwater errors leave it with their note."""

    @wraps(act)
    def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from act(*args, **kwargs)
        except HeadwaterError as error:
            raise note(error)  # noqa: B904 - the same error

    return call


# Driver


def cause_of(error: BaseException) -> HeadwaterError:
    """Return the Headwater error that was raised inside Spark, or an error with Spark's own message."""
    if isinstance(error, HeadwaterError):
        return error
    text = "\n".join([type(error).__name__, str(error), *_java(error)])
    if found := _NOTE.search(text):
        told: dict[str, Any] = msgspec.json.decode(found[1])
        return error_of(told["code"], told["message"], told["details"])
    if any(word in text for word in _LOST):
        return Unavailable("an executor was lost in the middle of its work", hint="Try again.")
    if _GONE.match(text):
        hint = "It was killed, or ran out of memory; start again."
        return PipelineError("Spark's Java process is gone", hint=hint, **{JAVA: GONE})
    return PipelineError(_line(error, text))


def is_gone(error: BaseException) -> bool:
    """Return whether `error` says that Spark's Java process has ended or could not be reached."""
    return cause_of(error).extra.get(JAVA) == GONE


def explain(error: BaseException) -> str:
    """Return one line for output: the message, the code and the hint of the cause of `error`."""
    cause = cause_of(error)
    said = f"{cause.message.rstrip('.')} ({cause.code})."
    return " ".join(f"{said} {cause.hint}".split())


def _java(error: BaseException) -> list[str]:
    """Return the messages of the Java exceptions, from the outermost to its cause."""
    said: list[str] = []
    java = getattr(error, "java_exception", None)
    while java is not None and len(said) < _DEEPEST:
        try:
            said.append(str(java.toString()))
            java = java.getCause()
        except Exception:  # Java may have ended: use the messages read so far
            break
    return said


def _line(error: BaseException, text: str) -> str:
    """Return the line of Spark's text that names the cause."""
    java = _java(error)
    if python := list(_TRACEBACK.finditer(text)):
        said = python[-1]["line"]
    elif task := _TASK.search(text):
        said = task["line"]
    else:
        lines = map(str.strip, (java[-1] if java else str(error)).splitlines())
        said = next(filter(None, lines), type(error).__name__)
    return _CLASS.sub("", _PACKAGE.sub("", said))[:_LONGEST]
