"""Authentication: API keys, JSON Web Tokens, tickets."""
