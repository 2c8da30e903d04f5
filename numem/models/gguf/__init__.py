"""GGUF files, written as ordinary model directories."""
