"""Methods that store every entry with fewer bits, in fewer dimensions, or entropy coded."""
