"""Errors that pass through Spark keep their class, message and hint."""

import traceback

import pytest

from headwater.errors import HeadwaterError, OffsetExpired, PipelineError, SchemaChanged, Unavailable
from headwater.pipeline.failure import cause_of, explain, is_gone, note, report_errors, report_generator_errors


def as_spark_tells(error: Exception) -> Exception:
    """Return an exception whose text holds the traceback, as in the driver after a worker failed."""
    try:
        raise error
    except Exception:
        text = traceback.format_exc()
    return RuntimeError(f"Job aborted. Lost task 0.0:\n {text} SQLSTATE: 38000\n\tat org.apache.Spark(x.scala:3)\n")


@pytest.mark.parametrize(
    "error",
    [
        SchemaChanged('two\nlines, "quotes" and {braces}', hint="do it", resnapshot_reason="schema_changed"),
        OffsetExpired(3, 7, 9),
        Unavailable("later"),
        HeadwaterError("plain"),
    ],
)
def test_headwater_error_survives_spark_with_message_hint_and_extra(error: HeadwaterError) -> None:
    found = cause_of(as_spark_tells(note(note(error))))
    assert type(found) is type(error)
    assert (found.message, found.hint, found.extra) == (error.message, error.hint, error.extra)


def test_cause_of_a_headwater_error_is_the_error_itself() -> None:
    error = SchemaChanged("x")
    assert cause_of(error) is error


def test_decorated_functions_and_generators_raise_their_own_errors() -> None:
    @report_errors
    def call() -> None:
        raise Unavailable("a")

    @report_generator_errors
    def each():
        yield 1
        raise Unavailable("b")

    with pytest.raises(Unavailable) as caught:
        call()
    assert cause_of(as_spark_tells(caught.value)).message == "a"
    with pytest.raises(Unavailable) as caught:
        list(each())
    assert cause_of(as_spark_tells(caught.value)).message == "b"


def test_foreign_error_is_reported_by_its_last_line() -> None:
    found = cause_of(as_spark_tells(ValueError("no such thing")))
    assert isinstance(found, PipelineError) and found.message == "ValueError: no such thing"


class Java:
    """A Java exception as Py4J represents it."""

    def __init__(self, said: str, cause: "Java | None" = None) -> None:
        self.said, self.cause = said, cause

    def toString(self) -> str:
        return self.said

    def getCause(self) -> "Java | None":
        return self.cause


class FromJava(Exception):
    """An exception like Py4JJavaError, whose own text does not name the cause."""

    def __init__(self, java_exception: Java) -> None:
        super().__init__("An error occurred while calling o47.save.")
        self.java_exception = java_exception


def test_java_failure_is_reported_by_its_innermost_cause() -> None:
    inner = Java("java.io.IOException: disk full\n\tat java.io.File")
    assert cause_of(FromJava(Java("org.apache.spark.SparkException: Job aborted", inner))).message == (
        "IOException: disk full"
    )


def test_failed_java_task_is_reported_by_its_own_message() -> None:
    said = "org.apache.spark.SparkException: Task 0 in stage 0.0 failed 1 times, most recent failure: Lost task 0.0 in "
    said += (
        "stage 0.0 (TID 0) (host executor driver): org.apache.kafka.common.errors.TimeoutException: no broker\n\nDriver"
    )
    assert cause_of(FromJava(Java(said))).message == "TimeoutException: no broker"


def test_lost_executor_is_a_retryable_error() -> None:
    assert cause_of(RuntimeError("Job aborted: ExecutorLostFailure (executor 1 exited)")).retryable


def test_refused_connection_is_explained_as_a_dead_java_process() -> None:
    assert "Java process is gone" in explain(ConnectionRefusedError(111, "Connection refused"))


def test_refused_connection_of_a_task_is_not_a_dead_java_process() -> None:
    python = as_spark_tells(ConnectionRefusedError(111, "Connection refused"))
    java = FromJava(Java("java.net.ConnectException: Connection refused"))
    assert [is_gone(error) for error in (python, java)] == [False, False]
    assert cause_of(python).message == "ConnectionRefusedError: [Errno 111] Connection refused"


@pytest.mark.parametrize("name", ["Py4JNetworkError", "PySparkRuntimeError"])
def test_lost_connection_of_the_driver_is_a_dead_java_process(name: str) -> None:
    said = '[CANNOT_OPEN_SOCKET] Can not open socket: ["tried to connect: [Errno 111] Connection refused"].'
    assert is_gone(type(name, (Exception,), {})("" if name == "Py4JNetworkError" else said))


def test_explained_error_is_a_single_line_of_cause_code_and_hint() -> None:
    said = explain(as_spark_tells(note(SchemaChanged("it\nchanged.", hint="Start again."))))
    assert said == "it changed (schema_changed). Start again."
    assert explain(RuntimeError("[SOME_CLASS] what it was\nmore")) == "what it was (pipeline_failed)."
