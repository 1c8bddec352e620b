"""Methods that draft tokens and verify them, so that the answers are those of the cache that verifies."""
