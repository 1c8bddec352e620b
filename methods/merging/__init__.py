"""Methods that merge several entries into one."""
