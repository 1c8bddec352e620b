"""Submissions: what is sent, what is verified of it, and where it is shown."""
