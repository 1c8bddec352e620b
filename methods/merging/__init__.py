"""Methods that make one row of several."""
