"""HTTP: routes, requests and answers."""
