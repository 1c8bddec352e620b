"""Methods that divide a budget over the heads of a layer, over layers or over both."""
