"""Methods that divide a layer's budget over its heads, around any method that scores entries."""
