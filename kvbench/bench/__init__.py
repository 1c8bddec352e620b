"""`kvbench bench`: three clocks that are never mixed, each beside the dense cache in the same job (docs/timing.md)."""
