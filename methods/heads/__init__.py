"""Methods that give some heads every row and the others a few."""
