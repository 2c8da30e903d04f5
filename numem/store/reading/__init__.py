"""From a placement to verified bytes in a caller's buffers."""
