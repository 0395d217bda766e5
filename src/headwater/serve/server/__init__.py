"""The server: sockets, protocols, TLS, start and stop."""
