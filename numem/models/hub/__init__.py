"""Models known by key, and where their files come from."""
