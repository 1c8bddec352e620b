"""Methods that give some heads every entry and the others a few."""
