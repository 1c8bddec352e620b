"""The baseline of every comparison."""
