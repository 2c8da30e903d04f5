"""Attention state between pages and the durable plane: chunks, lookup, reading, and arrival from both ends."""
