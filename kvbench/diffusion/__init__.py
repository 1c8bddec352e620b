"""Denoising of masked diffusion models, and the cache policies in it."""
