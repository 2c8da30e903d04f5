"""Pages: who holds them, what is in them, what stays in them when a sequence has ended, and what goes."""
