"""The replication connection: frames, transactions, and the thread that reads them."""
