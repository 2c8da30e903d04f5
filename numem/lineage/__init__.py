"""Lineage: branches, logs and decisions over causal ids."""
