"""Masked diffusion models: the denoising loop, and the interface of cache policies."""
