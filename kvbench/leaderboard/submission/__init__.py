"""Submissions: packing, reading and delivering bundles."""
