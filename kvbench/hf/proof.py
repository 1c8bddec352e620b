"""The proof at load: a model whose attention kvbench does not serve exactly is refused with the reason."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.budget import LayerShape
from kvbench.errors import UserError
from kvbench.hf.adapter import Forward, attached, embedding_device, keeps_logits, run_model
from kvbench.hf.masked import prove_blocks
from kvbench.hf.rope import Rope, max_length, prove_ropes, rope_types
from kvbench.step import Moment, Step
from kvbench.store import LayerKV
from kvbench.store.positions import attend_rows

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of the largest logit: the difference to stock attention that rounding alone can make.

Measured in float32 over 49 tiny random models and 24-layer ones: 1e-5 at worst (a Mixtral), 5e-7 as a rule. Planted
faults, at weights large enough for attention to matter: positions one off 1e-3 and more, mask one ahead 2e-2, window
ignored 3e-1, window one too wide 1e-1, sinks ignored 3e-1, soft cap ignored 2e-3. Half precision hides the smallest of
these (rounding makes 5e-2), so models that fit are proven on a copy in float32.
"""
NOISE = 2.0
"""In half precision, times the difference that embeddings rounded otherwise make: a router near a tie can flip."""
COPIED = 1 << 30
"""Parameters up to which a model in half precision is copied to float32 for the proof."""
SERVED_LAYERS = {"full_attention", "sliding_attention"}
PROBE = 33
"""Tokens beyond the window, and positions compared in each chunk."""
STEPS = 2
STOCK_CHUNK = 1024
"""Most tokens at once where every attention weight is written out."""
NEAR, FAR = 3, 1003
"""Positions at which a lone token shows its rotation."""


def prove(module: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[Rope, ...]]:
    """Shapes and rotary embeddings of all layers, after comparing with stock cached decoding.

    Raises:
        UserError: the architecture does something that kvbench does not serve.
    """
    config = module.config.get_text_config()
    name, shapes = config.model_type, _examine(module)
    precise = _precise(module)
    far = min(FAR, max_length(config) - 1)
    with attached(precise), _refusing(name):
        near_keys, far_keys = ([x.key for x in catch_steps(precise, position)] for position in (NEAR, far))
        ropes = prove_ropes(module, near_keys, far_keys, far - NEAR)
    window = max(getattr(config, "sliding_window", None) or 0, *(x.window or 0 for x in shapes))
    ids = _probe_ids(module, min(window + PROBE, max_length(config)))
    with _refusing(name):
        worst, bound = compare(precise, ids)
    if not worst <= bound:
        raise UserError(
            f"{name} does not compute the same through kvbench's attention: logits differ by {worst:.2g} on a probe "
            f"of {ids.shape[1]} tokens (rounding allows {bound:.2g}). It is not served."
        )
    return shapes, ropes


def prove_bidirectional(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Shapes of all layers of a diffusion model, after comparing its blocks, run one by one, with stock attention.

    Raises:
        UserError: the architecture does something that kvbench does not serve.
    """
    name, shapes = module.config.get_text_config().model_type, _examine(module)
    if any(x.window is not None for x in shapes):
        raise UserError(f"{name} is a diffusion model with sliding attention: not served.")
    precise = _precise(module)
    with _refusing(name):
        worst, largest = prove_blocks(precise, _probe_ids(precise, PROBE), attend_rows)
    if not worst <= TOLERANCE[precise.dtype] * largest:
        raise UserError(
            f"{name} does not compute the same block by block: logits differ by {worst:.2g} on a probe of {PROBE} "
            "tokens. It is not served."
        )
    return shapes


def _examine(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Shapes of all layers, where the configuration and the type of the weights are served (`UserError`)."""
    config = module.config.get_text_config()
    refuse_config(config)
    if module.dtype not in TOLERANCE:
        raise UserError(
            f"{config.model_type} has weights of type {module.dtype}: kvbench serves float32, bfloat16 and float16."
        )
    return layer_shapes(module)


def layer_shapes(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer caches per token, from one token run through it; the module may be on the meta device.

    Raises:
        UserError: a layer does not call the attention function once, or has no rows of its own.
    """
    config = module.config.get_text_config()
    name, layers = config.model_type, config.num_hidden_layers
    with attached(module), _refusing(name):
        steps = catch_steps(module)
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
        types = ", ".join(sorted(others))
        raise UserError(f"{name} has layers of type {types}; kvbench serves full and sliding attention.")
    if "dynamic" in rope_types(config):
        raise UserError(f"{name} has 'dynamic' rotary embeddings, which change with the text's length: not served.")
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"{name} caches latents (MLA), not keys and values that methods could work on: not served.")
    if getattr(config, "num_kv_shared_layers", None):
        raise UserError(
            f"{name} has {config.num_kv_shared_layers} layers that read other layers' rows, and a store of kvbench "
            "belongs to one layer: not served."
        )


def compare(module: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """The worst difference of logits to stock cached decoding, and what rounding allows. ids: [1, P]"""
    length = ids.shape[1]
    steps = range(length - STEPS, length + 1)
    halves = list(itertools.pairwise([0, length // 2, *steps]))
    whole = list(itertools.pairwise([*range(0, length - STEPS, STOCK_CHUNK), *steps]))
    rows = [i for low, high in halves for i in range(max(low, high - PROBE), high)]
    stock = _stock(module, ids, whole, rows)
    bound = TOLERANCE[module.dtype] * stock.abs().max().item()
    if module.dtype != torch.float32:
        with _jittered(module):
            bound = max(bound, NOISE * (stock - _stock(module, ids, whole, rows)).abs().max().item())
    return (stock - _served(module, ids, halves)).abs().max().item(), bound


def _precise(module: PreTrainedModel) -> PreTrainedModel:
    """The module in float32, if that is cheap."""
    if module.dtype == torch.float32 or sum(x.numel() for x in module.parameters()) > COPIED:
        return module
    precise: PreTrainedModel = copy.deepcopy(module).float()
    return precise


def _probe_ids(module: PreTrainedModel, length: int) -> Tensor:
    vocabulary = module.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.to(embedding_device(module))


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """What an unknown architecture may raise, as a refusal."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name} cannot run through kvbench's attention: {reason}") from error


def catch_steps(module: PreTrainedModel, position: int = 0, ropes: Sequence[Rope] = ()) -> list[Step]:
    """What every layer asks of attention for a lone token, whose output is its own value; in the order of layers.

    kvbench's attention must be attached.
    """
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        return step.value.repeat_interleave(step.query.shape[1] // step.value.shape[1], dim=1)

    ids = _probe_ids(module, 1)
    positions = torch.tensor([[position]], device=ids.device)
    forward = Forward(moment=Moment.CONTEXT_CHUNK, positions=positions, seen=1, attend=attend, ropes=ropes)
    run_model(module, ids, forward)
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
            forward = Forward(moment=Moment.CONTEXT_CHUNK, positions=positions, seen=high, attend=attend)
            logits.append(run_model(module, ids[:, low:high], forward, keep=min(PROBE, high - low)))
    return torch.cat(logits, dim=1).float()


@contextmanager
def _jittered(module: PreTrainedModel) -> Iterator[None]:
    """Change embeddings by as much as rounding does: the attention outputs of two correct kernels differ so."""
    step = torch.finfo(module.dtype).eps

    def jitter(_: nn.Module, __: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        signs = torch.randint(-1, 2, rows.shape, generator=torch.Generator().manual_seed(0)).to(rows.device)
        return (rows.float() * (1 + step * signs)).to(rows.dtype)

    hook = module.get_input_embeddings().register_forward_hook(jitter)
    try:
        yield
    finally:
        hook.remove()


def _stock(module: PreTrainedModel, ids: Tensor, chunks: list[tuple[int, int]], rows: list[int]) -> Tensor:
    """Logits of these rows by the model's own attention and transformers' cache. [1, rows, V]

    Not by SDPA: up to transformers 5.17 it left Gemma's soft caps out and said nothing.
    """
    logits, cache = [], None
    with torch.no_grad(), attached(module, "eager"):
        for low, high in chunks:
            kept = [i - low for i in rows if low <= i < high]  # no tensor, which would have to be where the head is
            options = {"logits_to_keep": kept} if keeps_logits(module) else {}
            answer = module(input_ids=ids[:, low:high], past_key_values=cache, use_cache=True, **options)
            cache = answer.past_key_values
            logits.append(answer.logits if options else answer.logits[:, kept])
    return torch.cat(logits, dim=1).float()
