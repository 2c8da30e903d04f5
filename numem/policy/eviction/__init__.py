"""Eviction policies: one protocol, and the order in which keys leave a resident set."""
