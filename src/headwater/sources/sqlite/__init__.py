"""SQLite source, embedded or shared with other processes: triggers record every change in a capture table."""
