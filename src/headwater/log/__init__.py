"""The durable log: ordered, retained changes of one database in one SQLite file."""
