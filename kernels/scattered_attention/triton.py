"""No kernel of its own: SDPA computes it."""

from kvbench.kernels.scattered_attention.torch import scattered_attention

__all__ = ["scattered_attention"]
