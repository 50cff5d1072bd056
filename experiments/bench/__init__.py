"""Benchmarks of parts against named peers."""
