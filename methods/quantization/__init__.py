"""Methods that store every entry in fewer bits."""
