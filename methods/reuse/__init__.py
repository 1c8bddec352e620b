"""Methods that reuse KV entries across prompts."""
