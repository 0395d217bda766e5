"""SQLite, embedded or shared with other processes: triggers write every change into a capture table."""
