"""Attention mass that chosen queries put on every entry, normalized over these entries or over more."""

from kvbench.kernels.attention_mass import torch
from kvbench.kernels.choice import operation

__all__ = ["attention_mass", "joint_lse"]

attention_mass = operation(torch.attention_mass)
joint_lse = operation(torch.joint_lse)
