"""Attention by the package flash-attn for several queries whose mask it supports; otherwise torch's implementation.

In addition to the cases of SDPA's flash attention, it supports chunks after other entries, windows and soft caps.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from kvbench.kernels.choice import note
from kvbench.kernels.dense_attention import torch as plain


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, causal: bool = True, length: Tensor | None = None,
) -> Tensor:
    """Attention output of the last T tokens over all N entries; see `torch.dense_attention`. [B, H_q, T, D_v]"""
    n_query, n_key = query.shape[2], keys.shape[2]
    holes = window is not None and positions is not None  # the window counts tokens, and entries were dropped
    serves = not holes and sinks is None and length is None and (causal or window is None)
    if n_query == 1 or not serves or query.shape[3] != values.shape[3] or query.shape[3] > plain.FLASH_WIDTH:
        return plain.dense_attention(
            query, keys, values, scale=scale, seen=seen, window=window, positions=positions, softcap=softcap,
            sinks=sinks, causal=causal, length=length,
        )
    note(plain.label(n_query, n_key), "flash_attn")
    output = importlib.import_module("flash_attn").flash_attn_func(
        *(x.transpose(1, 2) for x in (query, keys, values)), softmax_scale=scale, causal=causal,
        window_size=(-1, -1) if window is None else (window - 1, 0), softcap=0.0 if softcap is None else softcap,
    )  # [B, T, H_q, D_v]; its causal mask is aligned to the last entry, as ours
    assert isinstance(output, torch.Tensor)
    return output.transpose(1, 2)
