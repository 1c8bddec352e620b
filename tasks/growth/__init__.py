"""Tasks with long answers, which show the effect of compression during decoding."""
