"""Methods that drop channels of keys."""
