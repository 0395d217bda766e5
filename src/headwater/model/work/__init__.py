"""The database and caller of each task, and fair shares of worker slots between them."""
