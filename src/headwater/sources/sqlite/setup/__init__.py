"""Set-up of a database file for capture, and removal of capture from it."""
