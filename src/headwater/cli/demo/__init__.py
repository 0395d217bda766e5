"""The demo: a real server, two programs that write, a kill, and proof that nothing is lost."""
