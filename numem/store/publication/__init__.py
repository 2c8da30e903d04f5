"""From a caller's buffers to durable and visible."""
