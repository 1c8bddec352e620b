"""Tasks without code: a TOML file with settings and a JSONL file of contexts and turns."""
