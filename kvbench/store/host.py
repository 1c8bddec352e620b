"""Entries in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.store.facts import Fact


class HostEntries:
    """Entries that were moved to the host, pinned, and are fetched one by one.

    On a CPU there is no other memory: the tier is then simulated, copies and counts included, and says so.
    """

    def __init__(self, entries: Tensor) -> None:
        """Copy the entries. [B, H_kv, n, ...]"""
        self._device = entries.device
        self.entries = torch.empty(entries.shape, dtype=entries.dtype, pin_memory=entries.is_cuda)
        self.entries.copy_(entries)

    @property
    def simulated(self) -> bool:
        """Whether host and device are the same memory."""
        return self._device.type == "cpu"

    def fetch(self, index: Tensor) -> Tensor:
        """These entries of every head, on the device that they came from. index: [B, H_kv, m]. [B, H_kv, m, ...]"""
        batch, heads, count = index.shape
        head = torch.arange(batch * heads).view(batch, heads, 1)
        found = self.take((head * self.entries.shape[2] + index.cpu()).flatten())
        return found.view(batch, heads, count, *self.entries.shape[3:])

    def take(self, places: Tensor) -> Tensor:
        """Entries by their place in [B * H_kv * n], on the device that they came from. [R] -> [R, ...]"""
        shape = (len(places), *self.entries.shape[3:])
        found = torch.empty(shape, dtype=self.entries.dtype, pin_memory=not self.simulated)
        torch.index_select(self.entries.flatten(0, 2), 0, places.cpu(), out=found)
        return found.to(self._device, non_blocking=True)


def host_fact(entries: int, device: torch.device) -> dict[str, Fact]:
    """The counter of entries in host memory, over all heads. device: of attention; a CPU's host is simulated."""
    return {"entries_on_simulated_host" if device.type == "cpu" else "entries_on_host": Fact(entries)}
