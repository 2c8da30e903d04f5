"""Models: descriptors, checkpoint reading, importers, hub, registry, tokenizers, and the decoder."""
