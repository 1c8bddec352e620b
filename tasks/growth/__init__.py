"""Tasks whose answers are long, so that what is dropped while decoding shows."""
