"""The live log: a durable log with a staged tail in memory."""
