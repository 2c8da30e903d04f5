"""Bytes: pieces, volumes, tiers, and the objects and files they lie in."""
