"""Methods that keep some entries of the cache and drop the others."""
