"""Methods that keep every entry in fewer bits."""
