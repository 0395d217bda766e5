"""The handlers of the HTTP routes."""
