"""Methods that make one entry of several."""
