"""Submissions: packed, read, delivered."""
