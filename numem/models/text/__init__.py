"""Text to ids and back: tokenizers and chat templates."""
