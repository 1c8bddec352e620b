"""Prompts whose documents occurred in earlier prompts, for methods that reuse KV entries."""
