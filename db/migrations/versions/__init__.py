"""The revision of the schema."""
