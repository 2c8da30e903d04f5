"""Policies of eviction, admission and restore-or-recompute."""
