"""The gRPC faces: other people's protocols as thin mappings onto feeds, rows and ranges."""
