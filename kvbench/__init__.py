"""kvbench: a benchmark harness for KV-cache techniques of language models."""

__version__ = "0.1.0"
