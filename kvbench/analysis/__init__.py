"""Analysis of finished runs: load, compare, query and rescore them."""
