"""Reference implementation: packed entries dequantized to float64, then dense attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention.naive import dense_attention
from kvbench.kernels.pack.naive import dequantize
from kvbench.kernels.pack.torch import Codes
from kvbench.kernels.ragged_attention.torch import Partial


def packed_attention(
    query: Tensor, keys: Codes, values: Codes, tail_keys: Tensor, tail_values: Tensor, *, scale: float, seen: int,
    window: int | None = None, positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens over packed entries and an exact tail. [B, H_q, T, D_v]

    positions: [B, H_kv, N] of all entries, needed with a window if entries were dropped.
    """
    entries = values.packed.shape[-2]
    return dense_attention(
        query, torch.cat([_exact(keys)[..., :entries, :], tail_keys.double()], dim=2),
        torch.cat([_exact(values), tail_values.double()], dim=2), scale=scale, seen=seen, window=window,
        positions=positions, softcap=softcap, sinks=sinks,
    )


def packed_partial(
    query: Tensor, keys: Codes, values: Codes, *, scale: float, seen: int, window: int | None = None,
    positions: Tensor | None = None, start: int = 0, softcap: float | None = None,
) -> Partial:
    """See `torch.packed_partial`, in float64."""
    exact = _exact(values)
    return earlier_partial(
        query, _exact(keys)[..., : exact.shape[2], :], exact, scale=scale, seen=seen, window=window,
        positions=positions, start=start, softcap=softcap,
    )


def earlier_partial(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, seen: int, window: int | None,
    positions: Tensor | None, start: int, softcap: float | None,
) -> Partial:
    """Partial attention over entries that all precede the queries; zero and -inf if none is inside the window."""
    n_query = query.shape[2]
    grouped = query.double().unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, T, D]
    logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped, keys.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if window is not None:
        at = torch.arange(start, start + keys.shape[2]) if positions is None else positions[:, :, None, None]
        logits = logits.masked_fill(torch.arange(seen - n_query, seen)[:, None] - at >= window, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    output = torch.einsum("bhgtn,bhnd->bhgtd", weights, values.double())
    return Partial(output.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2))


def _exact(codes: Codes) -> Tensor:
    return dequantize(
        codes.packed, codes.scale, codes.minimum, codes.bits, codes.width, tokens=codes.tokens,
        channels=codes.channels,
    )
