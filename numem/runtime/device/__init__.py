"""Decoding on a device: the state of lanes, and steps that run ahead of the host."""
