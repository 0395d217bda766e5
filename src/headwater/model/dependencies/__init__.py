"""What a query reads, as values, and their description for people."""
