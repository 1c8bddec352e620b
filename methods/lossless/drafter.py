"""LongSpec's drafter: one layer that attends to a window of its own and to a layer of the model (arXiv 2502.17421).

Its input is the embedding of a token. Self-attention reads the last tokens, and cross-attention the entries of one of
the model's layers, in the paper the last, so a draft needs no cache of its own that grows. Embedding, final norm and
output head are those of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from kvbench.errors import UserError
from kvbench.hf import Forward
from kvbench.hf.adapter import attached
from kvbench.kernels.dense_attention.torch import WITHOUT_CUDNN
from kvbench.method import Moment, Step
from kvbench.store import LayerKV
from kvbench.techniques.training import WHOLE, TrainingProgress, train_part

if TYPE_CHECKING:
    from kvbench.hf import Model

ROUND = 8
"""Drafted tokens between two verifications in training; only entries before a round are read."""
RATE, WARM = 2e-3, 30
Batch = tuple[Tensor, Tensor, Tensor]
"""Ids, and whether the loss covers the prediction made there [B, T]; positions [B, T]."""


class Drafter(nn.Module):
    """The trained layer. reads: the model's layer whose entries it attends to.

    published: in the authors' form, with biases, without norms of queries and keys, and without the model's final norm.
    """

    def __init__(self, model: Model, window: int, reads: int = -1, *, published: bool = False) -> None:
        super().__init__()
        self.reads = reads % len(model.layers)
        base: Any = model.module.base_model
        if not hasattr(base, "norm") or model.module.get_output_embeddings() is None:
            raise UserError(f"longspec needs a model with a final norm and an output head, which {model.id} lacks.")
        shape = model.layers[reads]
        self.window, self.rope = window, model.ropes[reads]
        embedding: Any = model.module.get_input_embeddings()
        width = int(embedding.weight.shape[1])
        across, held = shape.query_heads * shape.key_dim, shape.kv_heads * shape.key_dim
        config = model.module.config.get_text_config()
        eps = config.rms_norm_eps if published else 1e-6
        self.head_dim, self.published = shape.key_dim, published
        self.norm_self, self.norm_cross, self.norm_mlp = (nn.RMSNorm(width, eps) for _ in range(3))
        self.query, self.key, self.value = (nn.Linear(width, n, bias=published) for n in (across, held, held))
        self.query_norm, self.key_norm, self.cross_norm = (
            nn.Identity() if published else nn.RMSNorm(shape.key_dim, eps) for _ in range(3)
        )
        self.out = nn.Linear(across, width, bias=False)
        self.cross_query = nn.Linear(width, across, bias=published)
        self.cross_out = nn.Linear(shape.query_heads * shape.value_dim, width, bias=False)
        inner = int(config.intermediate_size)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def take_layers(self, model: Model) -> None:
        """Start as the model's first layer, with queries and feed-forward part of the one that is read."""
        base: Any = model.module.base_model
        first, last = base.layers[0], base.layers[self.reads]
        parts = {
            "norm_self": (first, "input_layernorm"), "query": (first, "self_attn.q_proj"),
            "key": (first, "self_attn.k_proj"), "value": (first, "self_attn.v_proj"),
            "out": (first, "self_attn.o_proj"), "query_norm": (first, "self_attn.q_norm"),
            "key_norm": (first, "self_attn.k_norm"), "norm_cross": (last, "input_layernorm"),
            "cross_query": (last, "self_attn.q_proj"), "cross_norm": (last, "self_attn.q_norm"),
            "cross_out": (last, "self_attn.o_proj"), "norm_mlp": (last, "post_attention_layernorm"),
            "gate": (last, "mlp.gate_proj"), "up": (last, "mlp.up_proj"), "down": (last, "mlp.down_proj"),
        }
        for name, (layer, path) in parts.items():
            own, source = getattr(self, name).weight, layer
            for part in path.split("."):
                source = getattr(source, part, None)
            weight = getattr(source, "weight", None)
            if weight is not None and weight.shape == own.shape:
                own.data.copy_(weight)

    def forward(
        self, model: Model, ids: Tensor, positions: Tensor, keys: Tensor, values: Tensor, rows: int,
        far: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token after the last `rows` of these tokens. [B, rows, V]

        model: it has the embedding and the output head; drafters outlive their models in memory, so they hold none.
        ids, positions: [B, T], which self-attention reads. keys, values: of the layer that is read [B, H_kv, N, D].
        far: the entries that each row may read [rows, N]; None: all.
        """
        module: Any = model.module
        hidden = module.get_input_embeddings()(ids).float()
        x = self.norm_self(hidden)
        place = torch.arange(ids.shape[1], device=ids.device)
        ahead = place[-rows:, None] - place
        near = (ahead >= 0) & (ahead < self.window)
        query = self.rope.rotate(self.query_norm(self._split(self.query(x[:, -rows:]))), positions[:, -rows:])
        key = self.rope.rotate(self.key_norm(self._split(self.key(x))), positions)
        hidden = hidden[:, -rows:] + self._join(self.out, query, key, self._split(self.value(x)), near)
        asked = self.cross_norm(self._split(self.cross_query(self.norm_cross(hidden))))
        asked = self.rope.rotate(asked, positions[:, -rows:])
        hidden = hidden + self._join(self.cross_out, asked, keys.float(), values.float(), far)
        x = self.norm_mlp(hidden)
        hidden = hidden + self.down(F.silu(self.gate(x)) * self.up(x))
        hidden = hidden.to(module.dtype)
        logits: Tensor = module.get_output_embeddings()(hidden if self.published else module.base_model.norm(hidden))
        return logits.float()

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]"""
        found: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return found

    @staticmethod
    def _join(out: nn.Linear, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention and its output projection. [B, T, width]"""
        with sdpa_kernel(list(WITHOUT_CUDNN)):
            found = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=query.shape[1] != keys.shape[1]
            )
        joined: Tensor = out(found.transpose(1, 2).flatten(2))
        return joined


def read_target(model: Model, ids: Tensor, positions: Tensor, reads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's most likely next tokens [B, T], and keys and values of a layer [B, H_kv, T, D]."""
    stores = [LayerKV() for _ in model.layers]

    def attend(step: Step) -> Tensor:
        stores[step.layer].append(step)
        return stores[step.layer].attend(step)

    forward = Forward(
        moment=Moment.CONTEXT_CHUNK, positions=positions, seen=ids.shape[1], attend=attend, ropes=model.ropes
    )
    with attached(model.module):
        choices = model.run(ids, forward, ids.shape[1]).argmax(-1)
    return choices, stores[reads].keys, stores[reads].values


def measure_loss(drafter: Drafter, model: Model, batch: Batch, step: int) -> tuple[Tensor, float]:
    """Cross-entropy to the model's own choices, and the share of these that the drafter predicts.

    Where a row is the r-th token of a round, it reads entries before the round only.
    """
    ids, wanted, positions = batch
    choices, keys, values = read_target(model, ids, positions, drafter.reads)
    first = int(wanted.any(0).nonzero()[0])
    place = torch.arange(ids.shape[1], device=ids.device)
    round_start = place - (place + step) % ROUND
    far = place < round_start[first:, None].clamp(min=1)
    logits = drafter(model, ids, positions, keys, values, ids.shape[1] - first, far)
    chosen = wanted[:, first:]
    right = float((logits.argmax(-1) == choices[:, first:])[chosen].float().mean())
    return F.cross_entropy(logits[chosen], choices[:, first:][chosen]), right


def train(
    model: Model, window: int, steps: int, draw: Callable[[int], Batch], reads: int = -1,
    progress: TrainingProgress = WHOLE,
) -> dict[str, Tensor]:
    """Train a drafter on the model's own choices; the model stays as it is.

    draw: the batch of a step, which reports the share of tokens that the drafter predicts.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = Drafter(model, window, reads).to(model.device)
    drafter.take_layers(model)
    return train_part(
        drafter, torch.optim.AdamW(drafter.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0), steps,
        lambda step: RATE * min(1.0, (step + 1) / WARM) * max(0.02, 1 - step / steps),
        lambda step: measure_loss(drafter, model, draw(step), step),
        partial(nn.utils.clip_grad_norm_, max_norm=1.0), progress,
    )
