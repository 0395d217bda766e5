"""How a command ends: its exit code, and a failure that says what to do next."""

from __future__ import annotations

OK = 0
FAILED = 1  # the database, the log or the server refused, or something is unhealthy
USAGE = 2  # the command line or a setting is wrong
UNREACHABLE = 3  # no server answers


class Failure(Exception):
    """A command that cannot go on, in the words for the person at the terminal."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.message, self.hint, self.exit_code = message, hint, exit_code
