"""Embedding models: what stands around the transformer, and the verb that turns texts into vectors."""
