"""The load check: compares a model's logits through kvbench with stock attention, and refuses it if they differ."""

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
from kvbench.errors import UserError, first_line
from kvbench.hf.adapter import Forward, attached, embedding_device, keeps_logits, run_model
from kvbench.hf.masked import prove_blocks
from kvbench.hf.rope import Rope, max_length, prove_ropes, rope_types
from kvbench.step import Moment, Step
from kvbench.store import LayerKV
from kvbench.store.positions import attend_rows

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Difference to stock attention that rounding alone can cause, as a share of the largest logit.

Measured in float32 over 49 tiny random models and models of 24 layers: 1e-5 at worst (a Mixtral), 5e-7 typically.
Planted faults, with weights large enough for attention to matter: positions off by one 1e-3 and more, mask off by one
2e-2, window ignored 3e-1, window too wide by one 1e-1, sinks ignored 3e-1, soft cap ignored 2e-3. Half precision hides
the smallest of these (rounding alone gives 5e-2), so models that fit are checked on a copy in float32.
"""
NOISE = 2.0
"""Allowed multiple of the difference that rounded embeddings cause in half precision, where a router can flip."""
COPIED = 1 << 30
"""Most parameters of a model in half precision that is copied to float32 for the check."""
SERVED_LAYERS = {"full_attention", "sliding_attention"}
PROBE = 33
"""Tokens of the probe beyond the sliding window, and positions compared in each chunk."""
STEPS = 2
STOCK_CHUNK = 1024
"""Most tokens per forward pass with stock attention, which stores every attention weight."""
NEAR, FAR = 3, 1003
"""Positions of a single token between which its rotation is measured."""


def prove(module: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[Rope, ...]]:
    """Compare a model with stock cached decoding; return the shapes and rotary embeddings of its layers.

    Raises:
        UserError: kvbench does not support the architecture.
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
            f"of {ids.shape[1]} tokens (rounding allows {bound:.2g}). Use another model."
        )
    return shapes, ropes


def prove_bidirectional(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Compare a diffusion model, run layer by layer, with stock attention; return the shapes of its layers.

    Raises:
        UserError: kvbench does not support the architecture.
    """
    name, shapes = module.config.get_text_config().model_type, _examine(module)
    if any(x.window is not None for x in shapes):
        raise UserError(f"{name} is a diffusion model with sliding attention. Use one with full attention.")
    precise = _precise(module)
    with _refusing(name):
        worst, largest = prove_blocks(precise, _probe_ids(precise, PROBE), attend_rows)
    if not worst <= TOLERANCE[precise.dtype] * largest:
        raise UserError(
            f"{name} does not compute the same layer by layer: logits differ by {worst:.2g} on a probe of {PROBE} "
            "tokens. Use another model."
        )
    return shapes


def _examine(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Shapes of all layers. Raises UserError if the configuration or the element type is not supported."""
    config = module.config.get_text_config()
    refuse_config(config)
    if module.dtype not in TOLERANCE:
        raise UserError(
            f"{config.model_type} has weights of type {module.dtype}: kvbench supports float32, bfloat16 and float16."
        )
    return layer_shapes(module)


def layer_shapes(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Shapes of all layers' KV entries, found by running one token; the module may be on the meta device.

    Raises:
        UserError: a layer does not call the attention function exactly once.
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
            f"(not exactly once in layers {wrong[:8]}). Use a model in which every layer has one attention."
        )
    return tuple(
        LayerShape(x.key.shape[1], x.query.shape[1], x.key.shape[3], x.value.shape[3], x.window) for x in steps
    )


def refuse_config(config: Any) -> None:
    """Check that the configuration names nothing that kvbench does not support.

    Raises:
        UserError: it does; the message names it.
    """
    name = config.model_type
    others = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if others:
        types = ", ".join(sorted(others))
        raise UserError(f"{name} has layers of type {types}. Use a model of full or sliding attention.")
    if "dynamic" in rope_types(config):
        raise UserError(f"{name} has 'dynamic' rotary embeddings, which change with the length. Use another model.")
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"{name} caches latents (MLA) instead of keys and values. Use another model.")
    if getattr(config, "num_kv_shared_layers", None):
        raise UserError(
            f"{name} has {config.num_kv_shared_layers} layers that read the KV entries of other layers, and a store of "
            "kvbench belongs to one layer. Use another model."
        )


def compare(module: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """The largest difference of logits to stock cached decoding, and the difference allowed. ids: [1, P]"""
    length = ids.shape[1]
    steps = range(length - STEPS, length + 1)
    halves = list(itertools.pairwise([0, length // 2, *steps]))
    whole = list(itertools.pairwise([*range(0, length - STEPS, STOCK_CHUNK), *steps]))
    compared = [i for low, high in halves for i in range(max(low, high - PROBE), high)]
    stock = _stock(module, ids, whole, compared)
    bound = TOLERANCE[module.dtype] * stock.abs().max().item()
    if module.dtype != torch.float32:
        with _jittered(module):
            bound = max(bound, NOISE * (stock - _stock(module, ids, whole, compared)).abs().max().item())
    return (stock - _served(module, ids, halves)).abs().max().item(), bound


def _precise(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module in float32 if it is small enough, else the module itself."""
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
    """Turn exceptions of an unknown architecture into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{name} cannot run through kvbench's attention: {first_line(error)}") from error


def catch_steps(module: PreTrainedModel, position: int = 0, ropes: Sequence[Rope] = ()) -> list[Step]:
    """The attention step of every layer for a context of one token, in the order of layers; requires `attached`.

    The attention output is the token's own value.
    """
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        return step.value.repeat_interleave(step.query.shape[1] // step.value.shape[1], dim=1)

    ids = _probe_ids(module, 1)
    positions = torch.tensor([[position]], device=ids.device)
    forward = Forward(moment=Moment.CONTEXT_END, positions=positions, seen=1, attend=attend, ropes=ropes)
    run_model(module, ids, forward)
    return sorted(steps, key=lambda step: step.layer)


def _served(module: PreTrainedModel, ids: Tensor, chunks: list[tuple[int, int]]) -> Tensor:
    """Logits of each chunk's last positions, computed through kvbench's stores. [1, n, V]"""
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
    """Change embeddings by one rounding step, about as much as the outputs of two correct kernels differ."""
    step = torch.finfo(module.dtype).eps

    def jitter(_: nn.Module, __: tuple[Tensor, ...], hidden: Tensor) -> Tensor:
        signs = torch.randint(-1, 2, hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.device)
        return (hidden.float() * (1 + step * signs)).to(hidden.dtype)

    hook = module.get_input_embeddings().register_forward_hook(jitter)
    try:
        yield
    finally:
        hook.remove()


def _stock(module: PreTrainedModel, ids: Tensor, chunks: list[tuple[int, int]], compared: list[int]) -> Tensor:
    """Logits at the positions `compared`, by the model's eager attention and transformers' cache. [1, n, V]

    Eager and not SDPA: up to transformers 5.17, SDPA silently ignored Gemma's soft caps.
    """
    logits, cache = [], None
    with torch.no_grad(), attached(module, "eager"):
        for low, high in chunks:
            kept = [i - low for i in compared if low <= i < high]  # a tensor would have to be on the head's device
            options = {"logits_to_keep": kept} if keeps_logits(module) else {}
            answer = module(input_ids=ids[:, low:high], past_key_values=cache, use_cache=True, **options)
            cache = answer.past_key_values
            logits.append(answer.logits if options else answer.logits[:, kept])
    return torch.cat(logits, dim=1).float()
