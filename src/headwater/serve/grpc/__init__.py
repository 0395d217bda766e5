"""The gRPC services: protocols of other systems, mapped onto feeds, rows and ranges."""
