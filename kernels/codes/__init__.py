"""No operation: what the kernels of several share that read packed rows."""
