"""kvpress's side: `python theirs.py FOLDER`, in an environment with kvpress, after ours.py; writes the same arrays.

The presses below change kvpress's in one point each, which the note of their case names.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import kvpress
import numpy as np
import torch
import transformers
from cases import CASES, FILES, MODELS, Case
from kvpress import (
    AdaKVPress,
    BasePress,
    CompactorPress,
    DMSPress,
    DuoAttentionPress,
    FinchPress,
    KVzapPress,
    KVzipPress,
    LeverageScorePress,
    ObservedAttentionPress,
    QFilterPress,
    SimLayerKVPress,
    SnapKVPress,
    ThinKPress,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

ANSWER = "\n\nAnswer: "
"""Between prompt and repeat in the code of KVzip's authors, for models whose chat template they do not know."""


@dataclass
class H2O(ObservedAttentionPress):
    """Sums of attention weights, and the last half of the budget."""

    def score(
        self, module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, weights: Tensor, kwargs: Any
    ) -> Tensor:
        """[B, H_kv, n]"""
        scores = weights.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)
        scores[..., -count_kept(self, keys) // 2 :] = torch.inf
        return scores


@dataclass
class GroupedSnapKV(SnapKVPress):
    """The mean over the query heads of a KV head first, then the maximum over neighbors."""

    def score(
        self, module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, weights: Tensor, kwargs: Any
    ) -> Tensor:
        """[B, H_kv, n]"""
        weights = self.compute_window_attention(
            module, hidden, keys, self.window_size, kwargs["position_embeddings"]
        )
        scores = weights.mean(-2).unflatten(1, (keys.shape[1], -1)).mean(2)
        scores = F.max_pool1d(scores, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return F.pad(scores, (0, self.window_size), value=scores.max().item() + 1)


@dataclass
class FirstOfEqual(BasePress):
    """Another press's scores; of equal ones the first entry is kept, where kvpress's `topk` takes any."""

    press: Any

    def compress(
        self, module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, weights: Tensor, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer's best entries."""
        best = rank(self.press.score(module, hidden, keys, values, weights, kwargs))[..., : self.count(module, keys)]
        index = best[..., None].expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, index).contiguous(), values.gather(2, index).contiguous()

    def count(self, module: nn.Module, keys: Tensor) -> int:
        """Entries of a layer."""
        return count_kept(self.press, keys)


@dataclass
class AuthorsPyramidKV(FirstOfEqual):
    """Layer budgets of `PyramidKVCluster` (KVCache-Factory, pyramidkv/pyramidkv_utils.py)."""

    beta: int = 20

    def count(self, module: nn.Module, keys: Tensor) -> int:
        """Entries of a layer: fewer in each, in equal steps."""
        window = self.press.window_size
        before, mean = keys.shape[2] - window, count_kept(self.press, keys) - window
        high = min(2 * mean - mean // self.beta, before)
        step = (2 * high - 2 * mean) // (module.config.num_hidden_layers - 1)
        return (mean if keys.shape[2] < 2 * mean else high - module.layer_idx * step) + window


@dataclass
class AuthorsAdaKV(AdaKVPress):
    """Head budgets of `AdaptiveSnapKVCluster` (FFY0/AdaKV, adaptive_snapkv/monkeypatch/snapkv_utils.py)."""

    def compress(
        self, module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, weights: Tensor, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they are; what each head drops is masked."""
        window, heads = self.press.window_size, keys.shape[1]
        base = count_kept(self, keys) - window
        scores = self.press.score(module, hidden, keys, values, weights, kwargs)[0, :, :-window]
        owner = rank(scores.flatten())[: heads * base] // scores.shape[1]
        count = torch.bincount(owner, minlength=heads) * (1 - self.alpha_safeguard) + int(base * self.alpha_safeguard)
        masked = torch.zeros_like(keys[..., 0], dtype=torch.bool)
        for head, kept in enumerate(count.round().int().tolist()):
            masked[0, head, rank(scores[head])[kept:]] = True
        module.masked_key_indices = torch.nonzero(masked, as_tuple=True)
        return keys, values


def rank(scores: Tensor) -> Tensor:
    """Indices by falling score, of equal scores the first one first."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def count_kept(press: Any, keys: Tensor) -> int:
    """The budget in entries per KV head."""
    return int(keys.shape[2] * (1 - press.compression_ratio))


@dataclass
class MatchedKVzip(KVzipPress):
    """The authors' text between prompt and repeat, and as many first tokens that are kept as in kvbench."""

    def prepare(self, model: PreTrainedModel, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Chunks of the context and the ids that repeat them."""
        if tokenizer.chat_template is None:
            self._suffix_ids = tokenizer.encode(ANSWER, return_tensors="pt", add_special_tokens=False)
        self.prefix_length = self.n_sink = max(self.n_sink, self.prefix_length)
        return super().prepare(model, tokenizer, *args, **kwargs)


@dataclass
class WindowFinch(FinchPress):
    """The last tokens are the question, without a token that marks its start; keys stay at their positions."""

    last: int = 0

    def __call__(self, model: PreTrainedModel) -> Any:
        """Compress prompts inside a `with` statement."""
        self.window_size, self.rerotate_keys = self.last, False
        return BasePress.__call__(self, model)


@dataclass
class GivenDuoAttention(DuoAttentionPress):
    """Gates from a file."""

    gates: str = ""
    sink: int = 0
    recent: int = 0

    def load_attention_pattern(self, model: PreTrainedModel) -> tuple[int, int, np.ndarray]:  # type: ignore[override]
        """Sinks, recent entries and gates."""
        return self.sink, self.recent, np.loadtxt(self.gates, delimiter="\t")


@dataclass
class GivenKVzap(KVzapPress):
    """KVzap's predictor from a file."""

    weights: str = ""

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Load a linear predictor for every layer. [hidden + 1, H_kv]"""
        self.layers = load_layers(self.weights)

    def score(
        self, module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, weights: Tensor, kwargs: Any
    ) -> Tensor:
        """[B, H_kv, n]"""
        found = self.layers[module.layer_idx]
        return (hidden @ found[:-1] + found[-1]).mT


@dataclass
class BudgetDMS(DMSPress):
    """The threshold that leaves the budget, over all heads and layers."""

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Any:
        """Run the context once to score it, and again to evict."""
        ratio, window, forward = self.press.compression_ratio, self.sliding_window_size, model.model.forward

        def run_twice(input_ids: Tensor, past_key_values: DynamicCache) -> Any:
            self.sliding_window_size, self.threshold = input_ids.shape[1], -torch.inf
            forward(input_ids=input_ids, past_key_values=DynamicCache())
            scores = torch.stack([self.scores_buffer[i] for i in range(len(self.scores_buffer))])
            scores[..., -window:] = torch.inf
            kept = scores.numel() - round(scores.numel() * ratio)
            self.sliding_window_size, self.threshold = window, float(scores.flatten().topk(kept).values[-1])
            return forward(input_ids=input_ids, past_key_values=past_key_values)

        model.model.forward = run_twice
        try:
            with super().__call__(model):
                yield
        finally:
            model.model.forward = forward


@dataclass
class GivenQFilter(QFilterPress):
    """Directions from a file."""

    filters: str = ""

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Load the directions, whose sign is the opposite of kvpress's. [layers, H_kv, D]"""
        self.q_filters = -torch.stack(load_layers(self.filters))


@dataclass
class BudgetSimLayerKV(SimLayerKVPress):
    """As many layers that keep everything as a budget allows, and equal windows in the others."""

    ratio: float = 0.0
    width: int = 0
    """Entries of a lazy layer."""
    measured: int = 0
    """Recent entries by which laziness is measured."""

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Any:
        """Run the context once to measure the layers, and again to evict."""
        forward, layers = model.model.forward, model.config.num_hidden_layers

        def run_twice(input_ids: Tensor, past_key_values: DynamicCache) -> Any:
            n = input_ids.shape[1]
            mean = round(n * (1 - self.ratio))
            least = max(self.n_initial + 1, min(self.n_initial + 1024, mean // 5))
            full = min((mean - least) * layers // (n - least), layers - 1)
            self.width, self.measured = (mean * layers - full * n) // (layers - full), least - self.n_initial
            self.n_recent, self.lazy_threshold, self.found = self.width - self.n_initial + self.n_last, 0.5, []
            forward(input_ids=input_ids, past_key_values=DynamicCache())
            self.lazy = torch.tensor(self.found).argsort(stable=True)[full:].tolist()
            return forward(input_ids=input_ids, past_key_values=past_key_values)

        model.model.forward = run_twice
        try:
            with super().__call__(model):
                yield
        finally:
            model.model.forward = forward

    def is_lazy(self, module: nn.Module, hidden: Tensor, keys: Tensor, position_embeddings: Any) -> bool:
        """Measure first, as kvpress does; then, whether the layer is among the laziest."""
        if len(self.found) == module.config.num_hidden_layers:
            return module.layer_idx in self.lazy
        weights = SnapKVPress.compute_window_attention(module, hidden, keys, self.n_last, position_embeddings)
        weights = weights.mean((0, 1, 2))
        self.found.append(float(weights[: self.n_initial].sum() + weights[-self.measured :].sum()))
        return False


@dataclass
class SeededLeverage(LeverageScorePress):
    """One projection for all heads, from a seed."""

    def score(self, *args: Any, **kwargs: Any) -> Tensor:
        """[B, H_kv, n]"""
        draw = torch.randn

        def draw_once(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
            one = draw(*shape[2:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            return one.to(device, dtype).expand(shape)

        with mock.patch.object(torch, "randn", draw_once):
            return super().score(*args, **kwargs)


@dataclass
class SeededCompactor(CompactorPress):
    """With `SeededLeverage`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._leverage_press = SeededLeverage(self.compression_ratio, self.sketch_dimension)


def load_layers(path: str) -> list[Tensor]:
    """The arrays of a file, one per layer."""
    with np.load(path) as found:
        return [torch.from_numpy(found[f"arr_{i}"]) for i in range(len(found.files))]


def main() -> None:
    """Run every case on every model."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in MODELS:
        given = json.loads((folder / f"{name}.prompts.json").read_text(encoding="utf-8"))
        model = AutoModelForCausalLM.from_pretrained(given["folder"], dtype=torch.float32).eval()
        found: dict[str, np.ndarray] = {}
        for eager in (False, True):
            model.set_attn_implementation("eager" if eager else "sdpa")
            for i, prompt in enumerate(given["prompts"]):
                context, question = (torch.tensor([prompt[x]]) for x in ("context", "question"))
                full, logits = run(model, None, context, question)
                found[f"full/{i}/logits"] = logits
                for case in CASES:
                    if case.press is not None and case.eager == eager:
                        print(f"kvpress, {name}: {case.name}", flush=True)
                        files = {key: str(folder / f"{name}.{file}") for key, file in FILES.items()}
                        press = make_press(case, files)
                        cache, logits = run(model, press, context, question)
                        thin = isinstance(press, ThinKPress)
                        found[f"{case.name}/{i}/kept"] = find_channels(cache) if thin else find_kept(model, cache, full)
                        found[f"{case.name}/{i}/logits"] = logits
        facts = {"versions": {x: importlib.metadata.version(x) for x in ("kvpress", "torch", "transformers")}}
        np.savez(folder / f"{name}.theirs.npz", facts=np.array(json.dumps(facts)), **found)


def make_press(case: Case, files: Mapping[str, str]) -> Any:
    """The press of a case, at its budget."""
    assert case.press is not None
    outer, _, inner = case.press.removesuffix(")").partition("(")
    options = {key: files.get(value, value) if isinstance(value, str) else value for key, value in case.options.items()}
    if case.ratio:
        options[case.ratio] = 1 - float(case.budget.removesuffix("%")) / 100
    press = find_press(inner or outer)(**options)
    return find_press(outer)(press, **case.outer) if inner else press


def find_press(name: str) -> Any:
    """A class of this file or of kvpress."""
    return globals().get(name) or getattr(kvpress, name)


@torch.inference_mode()
def run(model: PreTrainedModel, press: Any, context: Tensor, question: Tensor) -> tuple[list[Tensor], np.ndarray]:
    """The keys of every layer after the context, and the question's logits [T, V], a token at a time.

    press: None leaves the cache whole.
    """
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    cache = DynamicCache()
    if press is None:
        model.model(input_ids=context, past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=context, past_key_values=cache)
    keys = [layer.keys.clone() for layer in cache.layers]
    logits = []
    for t in range(question.shape[1]):
        positions = torch.tensor([[context.shape[1] + t]])
        made = model(input_ids=question[:, t : t + 1], past_key_values=cache, position_ids=positions)
        logits.append(made.logits[0, -1])
    return keys, torch.stack(logits).float().numpy()


def find_channels(cache: list[Tensor]) -> np.ndarray:
    """Marks of the channels that are not 0 in every key. [layers, H_kv, D]"""
    return torch.stack([keys[0].any(dim=1) for keys in cache]).numpy()


def find_kept(model: PreTrainedModel, cache: list[Tensor], full: list[Tensor]) -> np.ndarray:
    """Marks of the entries kept: those whose keys are in the cache, but for masked ones. [layers, H_kv, n]"""
    kept = np.zeros((len(full), *full[0].shape[1:3]), dtype=bool)
    for index, (keys, wanted) in enumerate(zip(cache, full, strict=True)):
        for head in range(keys.shape[1]):
            place = {row.numpy().tobytes(): i for i, row in enumerate(wanted[0, head])}
            kept[index, head, [place[row.numpy().tobytes()] for row in keys[0, head]]] = True
        masked = getattr(model.model.layers[index].self_attn, "masked_key_indices", None)
        if masked is not None:
            _, heads, entries = masked
            kept[index, heads.numpy(), entries.numpy()] = False
    return kept


if __name__ == "__main__":
    main()
