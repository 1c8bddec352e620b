"""A CUDA graph on a CPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Tape(TorchDispatchMode):
    """Writes operations down with the memory they worked on, and does them again there, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and write it down."""
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    @property
    def shapes(self):
        """Every operation with the shapes of what it was given and what it made."""
        return [
            (str(func), [tuple(x.shape) for x in tree_flatten((args, kwargs, out))[0] if isinstance(x, torch.Tensor)])
            for func, args, kwargs, out in self.operations
        ]

    def replay(self):
        """The same operations on the same memory; computations of the host between them do not count."""
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
