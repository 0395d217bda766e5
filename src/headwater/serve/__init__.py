"""The wire: HTTP and RPC. No decision is taken here."""
