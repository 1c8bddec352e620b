"""The proof at load: a model whose attention kvbench does not serve exactly is refused with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE, Rope, find_rope
from kvbench.hf.seam import Forward, attached, run_model
from kvbench.method import LayerShape, Phase, Step
from kvbench.store import LayerKV

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of the largest logit: the difference to stock attention that rounding alone can make."""
SERVED_LAYERS = {"full_attention", "sliding_attention"}
PROBE = 33
STEPS = 2


def prove(module: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[Rope, ...]]:
    """Shapes and rotary embeddings of all layers, after comparing with stock cached decoding.

    Raises:
        UserError: the architecture does something that kvbench does not serve.
    """
    config = module.config.get_text_config()
    name = config.model_type
    others = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if others:
        raise UserError(f"{name} has layers of type {', '.join(sorted(others))}; kvbench serves full and sliding attention.")
    for kind in rope_types(config):
        if kind == "dynamic":
            raise UserError(f"{name} has '{kind}' rotary embeddings, which change with the length of the text: not served.")
    device = module.get_input_embeddings().weight.device
    with attached(module):
        shapes = _layer_shapes(module, name, config.num_hidden_layers, device)
        ropes = _ropes(module, shapes, device)
    window = max((x.window or 0 for x in shapes), default=0)
    ids = _probe_ids(config.vocab_size, max(PROBE, window + PROBE), device)
    ours, stock = _served(module, ids), _stock(module, ids)
    worst = (ours - stock).abs().max().item()
    bound = TOLERANCE[module.dtype] * max(1.0, stock.abs().max().item())
    if not worst <= bound:
        raise UserError(
            f"{name} does not compute the same through kvbench's attention: logits differ by {worst:.2g} on a probe of "
            f"{ids.shape[1]} tokens (rounding allows {bound:.2g}). It is not served."
        )
    return shapes, ropes


def rope_types(config: object) -> set[str]:
    """The kinds of rotary scaling that a config names, over its layer types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(x for x in parameters.values() if isinstance(x, dict))]
    return {str(x["rope_type"]) for x in sets if "rope_type" in x}


def _probe_ids(vocabulary: int, length: int, device: torch.device) -> Tensor:
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)


def _single(module: PreTrainedModel, position: int, device: torch.device) -> list[Step]:
    """The steps of one token at a position: its attention output is its own value, wherever it stands."""
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        return step.value.repeat_interleave(step.query.shape[1] // step.value.shape[1], dim=1)

    ids = _probe_ids(module.config.get_text_config().vocab_size, 1, device)
    positions = torch.tensor([[position]], device=device)
    run_model(module, ids, Forward(phase=Phase.CONTEXT, positions=positions, seen=1, attend=attend))
    return steps


def _layer_shapes(module: PreTrainedModel, name: str, layers: int, device: torch.device) -> tuple[LayerShape, ...]:
    try:
        steps = _single(module, 0, device)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UserError(f"{name} cannot run through kvbench's attention: {error}") from error
    calls = Counter(step.layer for step in steps)
    wrong = [layer for layer in range(layers) if calls[layer] != 1]
    if wrong or len(calls) != layers:
        raise UserError(
            f"{name} calls the attention function {sum(calls.values())} times for {layers} layers "
            f"(not exactly once in layers {wrong[:8]}): layers without attention in this form are not served."
        )
    return tuple(
        LayerShape(x.key.shape[1], x.query.shape[1], x.key.shape[3], x.value.shape[3], x.window)
        for x in sorted(steps, key=lambda step: step.layer)
    )


def _ropes(module: PreTrainedModel, shapes: tuple[LayerShape, ...], device: torch.device) -> tuple[Rope, ...]:
    """Each layer's rotary embedding: trusted if moving a token moves its key by just this rotation."""
    start, far = 3, 20
    near_steps = {x.layer: x for x in _single(module, start, device)}
    far_steps = {x.layer: x for x in _single(module, far, device)}
    attentions = {int(x.layer_idx): x for x in module.modules() if hasattr(x, "layer_idx") and hasattr(x, "config")}  # type: ignore[arg-type]
    types = getattr(module.config.get_text_config(), "layer_types", None)
    decoder = next((x for x in module.modules() if hasattr(x, "rotary_emb")), module)
    distance = torch.tensor([[far - start]], device=device)
    ropes = []
    for layer in range(len(shapes)):
        near, moved = near_steps[layer].key, far_steps[layer].key
        tolerance = TOLERANCE[module.dtype] * near.abs().max().item() + 1e-6
        candidate = find_rope(decoder, attentions[layer], types[layer] if types else None, near)
        found = next(
            (x for x in (NO_ROPE, candidate) if x and (x.shift(near, distance) - moved).abs().max().item() <= tolerance),
            replace(NO_ROPE, trusted=False),
        )
        ropes.append(found)
    return tuple(ropes)


def _served(module: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of every probe position through the stores: two chunks, then steps. [1, P, V]"""
    length = ids.shape[1]
    stores = [LayerKV() for _ in range(module.config.get_text_config().num_hidden_layers)]

    def attend(step: Step) -> Tensor:
        stores[step.layer].append(step)
        return stores[step.layer].attend(step)

    logits = []
    bounds = [0, length // 2, *range(length - STEPS, length + 1)]
    with attached(module):
        for low, high in zip(bounds, bounds[1:], strict=False):
            positions = torch.arange(low, high, device=ids.device)[None]
            forward = Forward(phase=Phase.CONTEXT, positions=positions, seen=high, attend=attend)
            logits.append(run_model(module, ids[:, low:high], forward, keep=high - low))
    return torch.cat(logits, dim=1).float()


def _stock(module: PreTrainedModel, ids: Tensor) -> Tensor:
    """The same logits by transformers' own attention and cache. [1, P, V]"""
    with torch.no_grad():
        first = module(input_ids=ids[:, :-STEPS], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for i in range(ids.shape[1] - STEPS, ids.shape[1]):
            answer = module(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            logits.append(answer.logits)
            cache = answer.past_key_values
    return torch.cat(logits, dim=1).float()
