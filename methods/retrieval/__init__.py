"""Methods whose decode steps read only some of the stored entries."""
