"""Methods that hold every entry and read some of them in a step."""
