"""Fixed-capacity lanes: many requests over one engine, step by step."""
