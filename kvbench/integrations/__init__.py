"""Other packages: lm-evaluation-harness, evaluate, experiment trackers."""
