"""Methods that keep every entry in some heads and a few in the others."""
