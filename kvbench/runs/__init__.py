"""One run, from its request to its result."""
