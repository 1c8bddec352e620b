"""Tasks in the formats of SCBench (arXiv 2412.10319), regenerated: never under SCBench's own ids."""
