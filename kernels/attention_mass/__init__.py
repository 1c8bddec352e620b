"""Attention mass that chosen queries put on every row, normalised over these rows or over more rows than these."""

from kvbench.kernels.attention_mass.torch import attention_mass, joint_lse

__all__ = ["attention_mass", "joint_lse"]
