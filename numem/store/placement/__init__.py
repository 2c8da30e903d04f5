"""Which copies are wanted, kept, made and let go of."""
