"""Facts: what is appended, how it is kept, and how it is found."""
