"""The JSON gateway and key-value access, as SochDB's clients know them."""
