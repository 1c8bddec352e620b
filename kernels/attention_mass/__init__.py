"""Attention mass that chosen queries put on every row, normalized over these rows or over more rows than these."""

from kvbench.kernels.attention_mass import torch
from kvbench.kernels.choice import operation

__all__ = ["attention_mass", "joint_lse"]

attention_mass = operation(torch.attention_mass)
joint_lse = operation(torch.joint_lse)
