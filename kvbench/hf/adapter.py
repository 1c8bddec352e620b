"""One attention function, registered once: the whole of what kvbench puts into transformers.

The model is called with explicit positions and without a cache. What a forward pass is for travels in a context
variable, because an extra keyword is swallowed by some architectures; the function finds its layer by `layer_idx`.
A registered name without a mask function gets no mask, so causality is ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvbench.hf.rope import NO_ROPE, Rope
from kvbench.step import Moment, Step

NAME = "kvbench"


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward pass: what it is for, and who answers for each layer's attention."""

    moment: Moment
    positions: Tensor  # [B, T]
    seen: int
    attend: Callable[[Step], Tensor]
    """Attention output of the step's new rows. [B, H_q, T, D_v]"""
    causal: bool = True
    ropes: Sequence[Rope] = ()


_FORWARD: ContextVar[Forward | None] = ContextVar("kvbench_forward", default=None)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: rotated query and new rows in, output out. [B, T, H_q, D_v]"""
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError("the model was called outside a kvbench session while kvbench's attention is switched on")
    if attention_mask is not None:
        raise RuntimeError("kvbench was handed an attention mask: padded batches are not served")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # nn.Module types every attribute as Tensor | Module
    step = Step(
        layer=layer, moment=forward.moment, positions=forward.positions.to(key.device), seen=forward.seen,
        query=query, key=key, value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap,
        sinks=s_aux, causal=forward.causal, rope=forward.ropes[layer] if forward.ropes else NO_ROPE,
    )
    return forward.attend(step).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def attached(module: PreTrainedModel, attention: str = NAME) -> Iterator[None]:
    """Switch the model to kvbench's attention (or another by name), and back to what it had."""
    before = module.config._attn_implementation  # noqa: SLF001  # transformers' own name for the setting
    if before == attention:
        yield
        return
    module.set_attn_implementation(attention)
    try:
        yield
    finally:
        module.set_attn_implementation(before or "eager")


def is_attached(module: PreTrainedModel) -> bool:
    """Whether kvbench's attention is switched on."""
    return bool(module.config._attn_implementation == NAME)  # noqa: SLF001  # as in `attached`


@contextmanager
def serving(forward: Forward) -> Iterator[None]:
    """Answer the attention calls that are made inside, without gradients."""
    token = _FORWARD.set(forward)
    try:
        with torch.no_grad():
            yield
    finally:
        _FORWARD.reset(token)


def run_model(module: PreTrainedModel, ids: Tensor, forward: Forward, keep: int = 1) -> Tensor:
    """Logits of the last `keep` positions. ids: [B, T]. Returns [B, keep, V]"""
    with serving(forward):
        options = {"logits_to_keep": keep} if keeps_logits(module) else {}
        logits: Tensor = module(input_ids=ids, position_ids=forward.positions, use_cache=False, **options).logits
    return logits[:, -keep:]


def embedding_device(module: PreTrainedModel) -> torch.device:
    """Where inputs go; weights that are elsewhere meanwhile are brought there by the hook of who spread the model."""
    embedding: Any = module.get_input_embeddings()
    spread = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return torch.device(embedding.weight.device if spread is None else spread)


def keeps_logits(module: nn.Module) -> bool:
    """Whether the model can apply its head to the last positions only."""
    kind = type(module)
    if kind not in _KEEPS_LOGITS:
        _KEEPS_LOGITS[kind] = "logits_to_keep" in inspect.signature(kind.forward).parameters
    return _KEEPS_LOGITS[kind]


_KEEPS_LOGITS: dict[type, bool] = {}
