"""Reference implementation: one query at a time, a softmax over its head's flat entries and tail, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_attention(
    query: Tensor, flat_keys: Tensor, flat_values: Tensor, counts: list[int], tail_keys: Tensor, tail_values: Tensor, *,
    scale: float, seen: int, window: int | None = None, flat_positions: Tensor | None = None,
    flat_bias: Tensor | None = None, tail_positions: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens over flat entries and a causal dense tail. [B, H_q, T, D_v]

    Positions of the flat entries [R] and of the tail [B, H_kv, N] are needed with a window. A bias [R] is added to the
    logits of the flat entries, after scale and soft cap.
    """
    batch, heads, n_query, _ = query.shape
    kv_heads, tail = tail_keys.shape[1:3]
    group = heads // kv_heads
    output = query.new_zeros((batch, heads, n_query, tail_values.shape[3]), dtype=torch.float64)
    start = 0
    for b in range(batch):
        for h in range(kv_heads):
            count = counts[b * kv_heads + h]
            keys = torch.cat([flat_keys[start : start + count], tail_keys[b, h]]).double()
            values = torch.cat([flat_values[start : start + count], tail_values[b, h]]).double()
            for head in range(h * group, (h + 1) * group):
                for t in range(n_query):
                    sees = torch.arange(count + tail) <= count + tail - n_query + t
                    if window is not None:
                        assert flat_positions is not None and tail_positions is not None
                        at = torch.cat([flat_positions[start : start + count], tail_positions[b, h]])
                        sees &= seen - n_query + t - at < window
                    logits = keys[sees] @ query[b, head, t].double() * scale
                    if softcap is not None:
                        logits = softcap * torch.tanh(logits / softcap)
                    if flat_bias is not None:
                        bias = torch.zeros(count + tail, dtype=torch.float64)
                        bias[:count] = flat_bias[start : start + count]
                        logits = logits + bias[sees]
                    if sinks is not None:
                        logits = torch.cat([logits, sinks[head : head + 1].double()])
                    weights = logits.softmax(-1)[: int(sees.sum())]
                    output[b, head, t] = weights @ values[sees]
            start += count
    return output.to(query.dtype)
