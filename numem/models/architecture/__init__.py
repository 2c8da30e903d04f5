"""What a model is, as data: families, descriptors, rotary embeddings."""
