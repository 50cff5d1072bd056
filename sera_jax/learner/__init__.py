"""Packing, the update step and checkpoints."""
