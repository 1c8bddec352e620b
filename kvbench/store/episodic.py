"""Several compressed caches of one context in host memory, of which one is on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.store.entries import FlatEntries
from kvbench.store.facts import Fact
from kvbench.store.host import host_fact
from kvbench.store.layer import OFFSET_BYTES, LayerKV


@dataclass
class EpisodicKV(LayerKV):
    """One layer: the chosen episode's entries of the context, and after them the entries of later turns."""

    episodes: list[dict[str, Tensor]] = field(default_factory=list, init=False)
    """Entries of the context by episode, on the host: key, value and, where there is a window, position."""
    loads: int = field(default=0, init=False)
    """Episodes that were moved to the device."""

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Entries of the active episode in one flat block with its offsets, and positions where there is a window."""
        return LayerKV(track=self.track or layer.window is not None).bytes_for(layer, shape, entries) + (
            (layer.kv_heads + 1) * OFFSET_BYTES
        )

    def adopt(
        self, episodes: Sequence[dict[str, Tensor]], *, seen: int, window: int | None, device: torch.device
    ) -> None:
        """Hold these caches of a context of `seen` tokens. Tensors: [B, H_kv, n, ...], already on the host."""
        self.episodes, self.seen, self._window = list(episodes), seen, window
        first = episodes[0]
        self.track = self.track or "position" in first
        held = seen if window is None else min(seen, window)
        self.dropped += first["key"].shape[:2].numel() * (held - first["key"].shape[2])
        empty = {name: x[:, :, :0].to(device) for name, x in first.items() if name != "position" or self.track}
        self._replace(empty, self.remaining)

    def load(self, chosen: Sequence[int]) -> None:
        """Put the episode that each sequence has chosen in the place of the one before, on the store's device."""
        device = self.keys.device
        parts = {
            name: torch.stack([self.episodes[x][name][row] for row, x in enumerate(chosen)]).to(device)
            for name in self.episodes[0]
        }
        heads, count = parts["key"].shape[:2].numel(), parts["key"].shape[2]
        offsets = torch.arange(heads + 1, dtype=torch.int32, device=device) * count
        flat = {name: x.flatten(0, 2) for name, x in parts.items()}
        self.frozen = FlatEntries(flat["key"], flat["value"], offsets, [count] * heads, flat.get("position"), None)
        self.loads += 1

    def host_tensors(self) -> list[Tensor]:
        """The entries of all episodes."""
        return [x for episode in self.episodes for x in episode.values()]

    def close(self) -> None:
        """Free the entries of all episodes."""
        super().close()
        self.episodes = []

    def facts(self) -> dict[str, Fact]:
        """Counters for the effect check, by name, and the entries of all episodes on the host."""
        entries = sum(x["key"].shape[:3].numel() for x in self.episodes)
        host = host_fact(entries, self.keys.device) if self.episodes else {}
        return {**super().facts(), "episodes_loaded": Fact(self.loads), **host}
