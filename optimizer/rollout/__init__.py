"""Rollouts: a policy comes into force on servers by blocks, and stays where it is proved faster."""
