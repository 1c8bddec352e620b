"""Methods that keep some rows of the cache and free the others."""
