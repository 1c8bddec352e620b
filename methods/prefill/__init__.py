"""Methods that compute only a part of the attention of the prompt."""
