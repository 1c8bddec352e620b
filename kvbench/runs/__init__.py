"""One run, from the request to its result."""
