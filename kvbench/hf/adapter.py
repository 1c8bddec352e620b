"""The attention function that kvbench registers with transformers, through which all models run.

The model is called with explicit positions and without a cache. The purpose of a forward pass is passed in a context
variable, because some architectures drop extra keyword arguments; the function knows its layer from `layer_idx`.
transformers builds no mask for a registered name without a mask function, so kvbench applies the causal mask itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvbench.hf.rope import NO_ROPE, Rope
from kvbench.step import Moment, Step

NAME = "kvbench"
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
"""Names that the attention modules of transformers give to their output projection."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The purpose of one forward pass, and the function that computes attention for every layer."""

    moment: Moment
    positions: Tensor  # [B, T]
    seen: int
    attend: Callable[[Step], Tensor]
    """Attention output of the step's queries. [B, H_q, T, D_v]"""
    causal: bool = True
    ropes: Sequence[Rope] = ()
    ids: Tensor | None = None
    """Ids of the tokens, which `run_model` fills in. [B, T]"""
    gradients: bool = False
    """Whether gradients flow back to what `attend` uses, to train a part of a method."""


_FORWARD: ContextVar[Forward | None] = ContextVar("kvbench_forward", default=None)
_HIDDEN: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""The hidden states that an attention module was called with, until its attention is computed."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers: rotated queries and new keys and values are given.

    query: [B, H_q, T, D]. key: [B, H_kv, T, D]. value: [B, H_kv, T, D_v]. Returns [B, T, H_q, D_v] and no weights.
    """
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError("the model was called outside a kvbench session while kvbench's attention is switched on")
    if attention_mask is not None:
        raise RuntimeError("kvbench was given an attention mask: padded batches are not supported")
    ids = None if forward.ids is None else forward.ids.to(key.device)
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # nn.Module types every attribute as Tensor | Module
    step = Step(
        layer=layer, moment=forward.moment, positions=forward.positions.to(key.device), seen=forward.seen,
        query=query, key=key, value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap,
        sinks=s_aux, causal=forward.causal, ids=ids, rope=forward.ropes[layer] if forward.ropes else NO_ROPE,
        hidden=_HIDDEN.pop(module, None),
        output=find_output(module, query.shape[1], value.shape[-1]) if forward.moment.compresses else None,
    )
    return forward.attend(step).transpose(1, 2).contiguous(), None


def find_output(module: nn.Module, heads: int, width: int) -> Tensor | None:
    """Weight of the output projection by query head, a view; None if the module has none of that size in memory.

    Returns [H_q, D_v, hidden].
    """
    for name in OUTPUTS:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().T
        elif isinstance(layer, Conv1D):
            weight = layer.weight.detach()
        else:
            continue
        if weight.shape[0] == heads * width and weight.is_floating_point() and not weight.is_meta:
            by_head: Tensor = weight.unflatten(0, (heads, width))
            return by_head
    return None


def project_queries(attention: nn.Module, hidden: Tensor, width: int) -> Tensor | None:
    """Queries before rotation that a layer's attention makes of hidden states; None if its projection is not found.

    hidden: [B, T, hidden]. width: of a head. Returns [B, H_q, T, D].
    """
    project = getattr(attention, "q_proj", None)
    if not isinstance(project, nn.Linear):
        return None
    flat, norm = project(hidden.to(_running_device(project))), getattr(attention, "q_norm", None)
    weight = getattr(norm, "weight", None)
    if norm is not None and weight is not None and weight.shape == flat.shape[-1:]:  # over all heads at once
        flat, norm = norm(flat), None
    elif weight is not None and weight.shape != (width,):
        return None
    query = flat.unflatten(-1, (-1, width)).transpose(1, 2)
    return query if norm is None else cast("Tensor", norm(query))


def find_bias(attention: nn.Module, kind: Literal["k", "v"], heads: int, width: int) -> Tensor:
    """The bias of a layer's keys or values; zeros if there is none, or it is not found. [H_kv, D] float32

    A norm after the projection leaves nothing that is added to every vector.
    """
    project = getattr(attention, f"{kind}_proj", None)
    normed = any(name.startswith(f"{kind}_") and "norm" in name for name, _ in attention.named_children())
    if not isinstance(project, nn.Linear) or project.bias is None or project.out_features != heads * width or normed:
        return torch.zeros(heads, width)
    # The bias itself is not in memory where weights are offloaded, so the module is run.
    zero = torch.zeros(1, project.in_features, dtype=project.bias.dtype, device=_running_device(project))
    found: Tensor = project(zero)[0].float().view(heads, width)
    return found


AttentionInterface.register(NAME, _attention)


@contextmanager
def attached(module: PreTrainedModel, attention: str = NAME) -> Iterator[None]:
    """Switch the model to kvbench's attention, or another one by name, and back at the end."""
    before = module.config._attn_implementation  # noqa: SLF001  # transformers' own name for the setting
    if before == attention:
        yield
        return
    module.set_attn_implementation(attention)
    try:
        yield
    finally:
        module.set_attn_implementation(before or "eager")


@contextmanager
def catching_hidden(module: PreTrainedModel) -> Iterator[None]:
    """Pass each layer's hidden states on to its attention step."""

    def catch(attention: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        _HIDDEN[attention] = named["hidden_states"] if "hidden_states" in named else args[0]

    with _hooked(list_attentions(module), catch):
        yield


@contextmanager
def narrowing(module: PreTrainedModel, find: Callable[[int], Tensor]) -> Iterator[None]:
    """Let only some tokens of a pass go on to a layer.

    find: the tokens that a layer runs, by their place in the pass [m], ascending; some of those of the layer before.
    """
    before: list[Tensor] = []

    def narrow(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        index = numbers[layer]
        places = find(index)
        if index == 0:
            before[:] = [places]
        first = args[0] if args else named.pop("hidden_states")
        kept = torch.searchsorted(before[0], places)
        before[0] = places
        return (first[:, kept], *args[1:]), _at_places(named, places[None])

    layers = decoder_layers(module)
    numbers = {layer: i for i, layer in enumerate(layers)}
    with _hooked(layers, narrow):
        yield


@contextmanager
def bypassing(module: PreTrainedModel, find: Callable[[int], Tensor | None]) -> Iterator[None]:
    """Let some tokens of a pass skip a layer: their hidden states stay as they are.

    find: the tokens that a layer runs, by their place in the pass, ascending [B, m]; None: all.
    """
    layers = decoder_layers(module)
    numbers = {layer: i for i, layer in enumerate(layers)}
    skipping: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def gather(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        places = find(numbers[layer])
        if places is None:
            return None
        first = args[0] if args else named.pop("hidden_states")
        skipping[layer] = first, places
        return (_take(first, places), *args[1:]), _at_places(named, places)

    def put_back(layer: nn.Module, _: Any, output: Any) -> Any:
        if layer not in skipping:
            return None
        before, places = skipping.pop(layer)
        found = output[0] if isinstance(output, tuple) else output
        whole = before.scatter(1, places[..., None].expand(-1, -1, before.shape[2]), found)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    handles = [x.register_forward_hook(put_back) for x in layers]
    try:
        with _hooked(layers, gather):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _at_places(named: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """A layer's named arguments for some tokens of every sequence. places: [B, m]"""
    angles, ids = named.get("position_embeddings"), named.get("position_ids")
    if isinstance(angles, tuple):
        named["position_embeddings"] = tuple(_take(x, places) for x in angles)
    if ids is not None:
        named["position_ids"] = ids.expand(len(places), -1).gather(1, places)
    return named


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Some tokens of every sequence. x: [B or 1, T, D]. places: [B, m]. Returns [B, m, D]"""
    return x.expand(len(places), -1, -1).gather(1, places[..., None].expand(-1, -1, x.shape[2]))


def decoder_layers(module: PreTrainedModel) -> list[nn.Module]:
    """The layers, each with its attention and its feed-forward part, in their order."""
    return [module.get_submodule(name.rpartition(".")[0]) for name, _ in _attentions(module)]


def list_attentions(module: nn.Module) -> list[nn.Module]:
    """The attention modules, in the order of the layers."""
    return [x for _, x in _attentions(module)]


def _attentions(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules with their names, in the order of the layers."""
    found = [
        (name, x) for name, x in module.named_modules()
        if hasattr(x, "layer_idx") and any(hasattr(x, output) for output in OUTPUTS)
    ]
    return sorted(found, key=lambda pair: int(cast("int", pair[1].layer_idx)))


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [x.register_forward_pre_hook(hook, with_kwargs=True) for x in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_attached(module: PreTrainedModel) -> bool:
    """Whether kvbench's attention is switched on."""
    return bool(module.config._attn_implementation == NAME)  # noqa: SLF001  # as in `attached`


@contextmanager
def serving(forward: Forward) -> Iterator[None]:
    """Compute the attention of all calls in this context with `forward`, without gradients unless it asks for them."""
    token = _FORWARD.set(forward)
    try:
        with torch.set_grad_enabled(forward.gradients):
            yield
    finally:
        _FORWARD.reset(token)


def run_model(module: PreTrainedModel, ids: Tensor, forward: Forward, keep: int | Tensor = 1) -> Tensor:
    """Logits of the last `keep` positions, or of the positions in `keep` [K]. ids: [B, T]. Returns [B, K, V]"""
    fewer = keeps_logits(module)
    with serving(replace(forward, ids=ids)):
        options = {"logits_to_keep": keep} if fewer else {}
        logits: Tensor = module(input_ids=ids, position_ids=forward.positions, use_cache=False, **options).logits
    if isinstance(keep, int):
        return logits[:, -keep:]
    return logits if fewer else logits[:, keep]


def embedding_device(module: PreTrainedModel) -> torch.device:
    """The device for the model's inputs."""
    return _running_device(module.get_input_embeddings())


def _running_device(module: Any) -> torch.device:
    """The device on which a part of a model runs. Offloaded weights are moved there by accelerate's hook."""
    spread = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device(module.weight.device if spread is None else spread)


def keeps_logits(module: nn.Module) -> bool:
    """Whether the model can compute logits for the last positions only."""
    kind = type(module)
    if kind not in _KEEPS_LOGITS:
        _KEEPS_LOGITS[kind] = "logits_to_keep" in inspect.signature(kind.forward).parameters
    return _KEEPS_LOGITS[kind]


_KEEPS_LOGITS: dict[type, bool] = {}
