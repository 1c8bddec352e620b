"""Verification of a submission: checks of its records (L0), reruns (L1, L2) and a fresh seed (L3)."""
