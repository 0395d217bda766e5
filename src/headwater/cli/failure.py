"""Exit codes, and the failure of a command with its hint."""

from __future__ import annotations

OK = 0
FAILED = 1  # the database, the log or the server refused, or something is unhealthy
USAGE = 2  # the command line or a setting is wrong
UNREACHABLE = 3  # no server answers


class Failure(Exception):
    """The failure of a command: `main` prints message and hint, and returns `exit_code`."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = FAILED, code: str = "") -> None:
        """Describe the failure; `code` is that of a server's error."""
        super().__init__(message)
        self.message, self.hint, self.exit_code, self.code = message, hint, exit_code, code
