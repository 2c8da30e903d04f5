"""Model directories and their tensors: checkpoints, lock files, what is made of them."""
