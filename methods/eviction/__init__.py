"""Methods that keep some KV entries and free the others."""
