"""Text as tokens: tokenization, chat templates, and the standard library as a text."""
