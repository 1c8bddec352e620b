"""The proof at load: a model whose attention kvbench does not serve exactly is refused with the reason."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.errors import UserError
from kvbench.hf.rope import Rope, max_length, prove_ropes, rope_types
from kvbench.hf.seam import Forward, attached, keeps_logits, run_model
from kvbench.method import LayerShape, Phase, Step
from kvbench.store import LayerKV

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of the largest logit: the difference to stock attention that rounding alone can make."""
SERVED_LAYERS = {"full_attention", "sliding_attention"}
PROBE = 33
"""Tokens beyond the window, and positions compared in each chunk."""
STEPS = 2
NEAR, FAR = 3, 1003
"""Positions at which a lone token shows its rotation."""


def prove(module: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[Rope, ...]]:
    """Shapes and rotary embeddings of all layers, after comparing with stock cached decoding.

    Raises:
        UserError: the architecture does something that kvbench does not serve.
    """
    config = module.config.get_text_config()
    refuse_config(config)
    if module.dtype not in TOLERANCE:
        raise UserError(f"{config.model_type} has weights of type {module.dtype}: kvbench serves float32, bfloat16, float16.")
    shapes = layer_shapes(module)
    far = min(FAR, max_length(config) - 1)
    with attached(module):
        near_keys, far_keys = ([x.key for x in _single(module, position)] for position in (NEAR, far))
    ropes = prove_ropes(module, near_keys, far_keys, far - NEAR)
    window = max(getattr(config, "sliding_window", None) or 0, *(x.window or 0 for x in shapes))
    ids = _probe_ids(module, min(window + PROBE, max_length(config)))
    worst, bound = compare(module, ids)
    if not worst <= bound:
        raise UserError(
            f"{config.model_type} does not compute the same through kvbench's attention: logits differ by {worst:.2g} on a "
            f"probe of {ids.shape[1]} tokens (rounding allows {bound:.2g}). It is not served."
        )
    return shapes, ropes


def layer_shapes(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer caches per token, from one token run through it; the module may be on the meta device.

    Raises:
        UserError: a layer does not call the attention function once, or has no rows of its own.
    """
    config = module.config.get_text_config()
    name, layers = config.model_type, config.num_hidden_layers
    with attached(module):
        steps = _single(module, 0)
    calls = Counter(x.layer for x in steps)
    wrong = [layer for layer in range(layers) if calls[layer] != 1]
    if wrong or len(calls) != layers:
        raise UserError(
            f"{name} calls the attention function {sum(calls.values())} times for {layers} layers "
            f"(not exactly once in layers {wrong[:8]}): layers without attention in this form are not served."
        )
    return tuple(
        LayerShape(x.key.shape[1], x.query.shape[1], x.key.shape[3], x.value.shape[3], x.window) for x in steps
    )


def refuse_config(config: Any) -> None:
    """Refuse what the configuration already says is not served.

    Raises:
        UserError: with the reason.
    """
    name = config.model_type
    others = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if others:
        raise UserError(f"{name} has layers of type {', '.join(sorted(others))}; kvbench serves full and sliding attention.")
    if "dynamic" in rope_types(config):
        raise UserError(f"{name} has 'dynamic' rotary embeddings, which change with the length of the text: not served.")
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"{name} caches latents (MLA), not the keys and values that kvbench's methods work on: not served.")
    if getattr(config, "num_kv_shared_layers", None):
        raise UserError(
            f"{name} has {config.num_kv_shared_layers} layers that read other layers' rows, and kvbench's stores belong to "
            "one layer each: not served."
        )


def compare(module: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """The worst difference of logits to stock cached decoding, and what rounding allows. ids: [1, P]"""
    length = ids.shape[1]
    bounds = [0, length // 2, *range(length - STEPS, length + 1)]  # two chunks, then single steps
    chunks = list(itertools.pairwise(bounds))
    rows = [i for low, high in chunks for i in range(max(low, high - PROBE), high)]
    ours = _served(module, ids, chunks)
    stock = _stock(module, ids, torch.tensor(rows[: -STEPS], device=ids.device))
    return (ours - stock).abs().max().item(), TOLERANCE[module.dtype] * stock.abs().max().item()


def _probe_ids(module: PreTrainedModel, length: int) -> Tensor:
    vocabulary = module.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.to(module.get_input_embeddings().weight.device)


def _run(module: PreTrainedModel, ids: Tensor, forward: Forward, keep: int = 1) -> Tensor:
    try:
        return run_model(module, ids, forward, keep)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        name = module.config.get_text_config().model_type
        raise UserError(f"{name} cannot run through kvbench's attention: {str(error).splitlines()[0]}") from error


def _single(module: PreTrainedModel, position: int) -> list[Step]:
    """The steps of a lone token at a position: its attention output is its own value, wherever it stands."""
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        return step.value.repeat_interleave(step.query.shape[1] // step.value.shape[1], dim=1)

    ids = _probe_ids(module, 1)
    positions = torch.tensor([[position]], device=ids.device)
    _run(module, ids, Forward(phase=Phase.CONTEXT, positions=positions, seen=1, attend=attend))
    return sorted(steps, key=lambda step: step.layer)


def _served(module: PreTrainedModel, ids: Tensor, chunks: list[tuple[int, int]]) -> Tensor:
    """Logits of each chunk's last positions through the stores. [1, rows, V]"""
    stores = [LayerKV() for _ in range(module.config.get_text_config().num_hidden_layers)]

    def attend(step: Step) -> Tensor:
        stores[step.layer].append(step)
        return stores[step.layer].attend(step)

    logits = []
    with attached(module):
        for low, high in chunks:
            positions = torch.arange(low, high, device=ids.device)[None]
            forward = Forward(phase=Phase.CONTEXT, positions=positions, seen=high, attend=attend)
            logits.append(_run(module, ids[:, low:high], forward, keep=min(PROBE, high - low)))
    return torch.cat(logits, dim=1).float()


def _stock(module: PreTrainedModel, ids: Tensor, rows: Tensor) -> Tensor:
    """Logits of these rows of the prompt, and of the steps, by transformers' own attention and cache. [1, rows, V]"""
    options = {"logits_to_keep": rows} if keeps_logits(module) else {}
    with torch.no_grad():
        answer = module(input_ids=ids[:, :-STEPS], use_cache=True, **options)
        logits = [answer.logits if options else answer.logits[:, rows]]
        for i in range(ids.shape[1] - STEPS, ids.shape[1]):
            answer = module(input_ids=ids[:, i : i + 1], past_key_values=answer.past_key_values, use_cache=True)
            logits.append(answer.logits)
    return torch.cat(logits, dim=1).float()
