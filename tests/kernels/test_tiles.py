"""How Triton's attention is cut into tiles: whole waves of programs on every multiprocessor."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")


def test_tiles_do_not_exceed_their_waves(monkeypatch):
    """All heads together have at most TILES tiles per multiprocessor, where there are no more heads than that."""
    from kvbench.kernels.dense_attention import triton as fast

    monkeypatch.setattr(fast, "_processors", lambda _: 132)
    for entries, parallel, block in itertools.product(
        (256, 4096, 32_768, 131_072), (1, 8, 64, 100, 1584, 5000), (16, 64, 128)
    ):
        split = fast.tile_entries(entries, parallel, 256, block, torch.device("cpu"))
        assert split % block == 0 and split >= 256
        assert -(-entries // split) * parallel <= max(parallel, fast.TILES * 132)
