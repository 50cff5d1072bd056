"""Environments whose states are pytrees of arrays: clones are free and steps batch."""
