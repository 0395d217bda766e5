"""RPC: methods, their parameters and results."""
