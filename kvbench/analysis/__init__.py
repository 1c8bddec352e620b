"""Finished runs: found, compared, queried, scored again."""
