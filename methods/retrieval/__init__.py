"""Methods that store every entry and read only some of them in each decode step."""
