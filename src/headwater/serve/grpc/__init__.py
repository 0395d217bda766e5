"""The gRPC services: protocols of other systems, mapped onto feeds, rows and ranges."""

import os

# The gRPC library would write a line to stderr for each refused request. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
