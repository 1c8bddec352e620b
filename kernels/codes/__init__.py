"""Functions shared by kernels that read packed entries; not an operation."""
