"""Methods that drop channels of keys, or elements of keys and values."""
