"""Methods that draft tokens with a compressed cache and verify them, so that the answers are those of another cache."""
