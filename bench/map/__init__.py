"""Which mechanism is fastest at which cost."""
