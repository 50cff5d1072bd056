"""Rubrics: written before a child runs, frozen, then used to score it."""
