"""Checks of a submission, from its records alone up to running it again."""
