"""Metrics and plots of a run."""
