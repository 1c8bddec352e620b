"""Methods that hold every row and read some of them in a step."""
