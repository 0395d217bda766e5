"""For whom a task works: a database and one of its callers, so that threads can be shared fairly."""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context

from headwater.model.principal import ANONYMOUS

WHOSE: ContextVar[str] = ContextVar("whose", default="")  # the database for which a task works; "": for none
CALLER: ContextVar[str] = ContextVar("caller", default="")  # the account of the principal for whom it works

UNNAMED = frozenset({"", ANONYMOUS.account})  # accounts that stand for more than one caller

Holder = tuple[str, str]  # a database, and one of its callers


def holder() -> Holder:
    """Return for whom this task works."""
    return WHOSE.get(), CALLER.get()


def shared_context() -> Context:
    """Return a context for a task that several callers wait for: it waits behind no calls of the one who began it."""
    found = copy_context()
    found.run(CALLER.set, "")
    return found
