"""Entries in host memory."""

from __future__ import annotations

import torch
from torch import Tensor


class HostRows:
    """Entries that were moved to the host, pinned, and are fetched one by one.

    On a CPU there is no other memory: the tier is then simulated, copies and counts included, and says so.
    """

    def __init__(self, rows: Tensor) -> None:
        """Copy the entries. [B, H_kv, n, ...]"""
        self._device = rows.device
        self.rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        self.rows.copy_(rows)

    @property
    def simulated(self) -> bool:
        """Whether host and device are the same memory."""
        return self._device.type == "cpu"

    def fetch(self, index: Tensor) -> Tensor:
        """These entries of every head, on the device that they came from. index: [B, H_kv, m]. [B, H_kv, m, ...]"""
        batch, heads, count = index.shape
        head = torch.arange(batch * heads).view(batch, heads, 1)
        flat = (head * self.rows.shape[2] + index.cpu()).flatten()
        found = torch.empty((len(flat), *self.rows.shape[3:]), dtype=self.rows.dtype, pin_memory=not self.simulated)
        torch.index_select(self.rows.flatten(0, 2), 0, flat, out=found)
        return found.to(self._device, non_blocking=True).view(batch, heads, count, *self.rows.shape[3:])
