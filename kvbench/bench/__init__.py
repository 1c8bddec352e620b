"""`kvbench bench`: timing at three levels, always next to the full cache in the same job (docs/timing.md)."""
