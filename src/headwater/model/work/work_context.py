"""Context variables with the database and the caller of a task, for fair sharing of threads."""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context

from headwater.model.principal import ANONYMOUS

WHOSE: ContextVar[str] = ContextVar("whose", default="")  # the database of a task; "" if it has none
CALLER: ContextVar[str] = ContextVar("caller", default="")  # the account of the principal of a task

UNNAMED = frozenset({"", ANONYMOUS.account})  # accounts that several callers share

Holder = tuple[str, str]  # a database, and one of its callers


def holder() -> Holder:
    """Return the database and the caller of this task."""
    return WHOSE.get(), CALLER.get()


def shared_context() -> Context:
    """Return a context without a caller, for a task that several callers wait for."""
    found = copy_context()
    found.run(CALLER.set, "")
    return found
