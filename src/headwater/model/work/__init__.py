"""Work of the server: for whom it is done, and how databases and callers share its places."""
