"""Published statements about attention and KV entries, tested on a model by statistics of real text."""
