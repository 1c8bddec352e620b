"""Methods that divide a budget over heads, around any method that scores entries."""
