"""RULER's published generator (NVIDIA/RULER, scripts/data/synthetic at c3f5e3b4): same samples for the same seed."""
