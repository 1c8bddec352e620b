"""Flux Attention: a trained router per layer decides, once per prompt, whether the layer reads every entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from kvbench.constraints import Positive
from kvbench.kernels.ragged_attention import dense_partial, merge_partials, ragged_partial
from kvbench.method import BudgetKind, Card, Shape, Step, Upstream, resolved
from kvbench.methods.prefill.router import make_routers, mark_stream, opens, pool_queries, train
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.facts import Fact
from kvbench.store.prompt import Chosen, PromptKV
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import find_part, get_module, get_part, load_module, rename_layers
from kvbench.techniques.sparse_prefill import SparsePrefillMethod
from kvbench.techniques.training import draw_halves

if TYPE_CHECKING:
    from kvbench.hf import Model

AUTHORS = rename_layers(
    r"model\.layers\.(\d+)\.self_attn\.mask_allocator\.cls_(\w+\.\d\.\w+)", {
        f"{part}.{theirs}.{kind}": f"{own}.{kind}"
        for part, theirs, own in (
            ("feat_extractor", 0, 0), ("feat_extractor", 2, 2), ("router_head_agnostic", 0, 3),
            ("router_head_agnostic", 2, 5), ("router_head_agnostic", 4, 7),
        ) for kind in ("weight", "bias")
    },
)
"""Names of the authors' weights, which are those of the released code."""
PUBLISHED_LENGTH = 4096
"""Tokens of a context from which on a sparse layer reads as much as in the authors' code."""
SPARSITY, TEXT = 0.45, 128
"""Share of sparse layers and tokens of a text, where the routers are trained when a run starts."""


@dataclass
class RoutedKV(PromptKV):
    """Every entry. Once the prompt is routed, later tokens of a sparse layer read its first and last entries."""

    sinks: int = 0
    local: int = 0
    """First and last entries that a sparse layer reads, the own one included."""

    whole: tuple[bool, ...] = field(default=(), init=False)
    """For each sequence, whether the layer reads every entry; empty before the prompt is routed."""
    skipped_reads: int = field(default=0, init=False)
    """Entries that later tokens did not read, over all KV heads."""

    def attend(self, step: Step) -> Tensor:
        """Attention of the last T tokens, for each sequence as it was routed. [B, H_q, T, D_v]"""
        if all(self.whole):
            return super().attend(step)
        count = step.query.shape[2]
        low = max(self.sinks, self.n - count - self.local + 1)
        parts = []
        for b, whole in enumerate(self.whole):
            keys, values = self.keys[b : b + 1], self.values[b : b + 1]
            options: dict[str, Any] = {"scale": step.scale, "seen": step.seen, "softcap": step.softcap}
            if whole:
                found = [dense_partial(step.query[b : b + 1], keys, values, **options)]
            else:
                first, its_values = (x[0, :, : self.sinks].flatten(0, 1) for x in (keys, values))
                counts = [self.sinks] * keys.shape[1]
                offsets = torch.arange(keys.shape[1] + 1, dtype=torch.int32, device=keys.device) * self.sinks
                found = [
                    ragged_partial(step.query[b : b + 1], first, its_values, offsets, counts, **options),
                    dense_partial(
                        step.query[b : b + 1], keys[:, :, low:], values[:, :, low:], window=self.local, **options
                    ),
                ]
                unread = (own + 1 - self.sinks - self.local for own in range(self.n - count, self.n))
                self.skipped_reads += sum(max(0, x) for x in unread) * keys.shape[1]
            parts.append(merge_partials(found, step.sinks).to(step.query.dtype))
        return torch.cat(parts)

    def read_bytes(self) -> int:
        """Bytes that a decode step reads: of sparse sequences, the first and the last entries."""
        held = super().read_bytes()
        if not self.whole:
            return held
        entries = [self.n if whole else min(self.n, self.sinks + self.local) for whole in self.whole]
        return held * sum(entries) // (self.n * len(entries))

    def fork(self) -> LayerKV:
        """An independent copy with a counter of its own."""
        other = super().fork()
        assert isinstance(other, RoutedKV)
        other.skipped_reads = 0
        return other

    def credit(self, branch: LayerKV) -> None:
        """Add the entries that a fork did not read."""
        super().credit(branch)
        assert isinstance(branch, RoutedKV)
        self.skipped_reads += branch.skipped_reads

    def facts(self) -> dict[str, Fact]:
        """The counts of the prompt's attention, of sparse layers, and of entries that later tokens did not read."""
        return {
            **super().facts(), "layers_sparse": Fact(self.whole.count(False)),
            "entries_skipped": Fact(self.skipped_reads, changed=True, restarts=True),
        }


@dataclass(frozen=True)
class FluxAttention(SparsePrefillMethod):
    """In layers that the router makes sparse, a token reads `sinks` first and `local` last entries."""

    sinks: Positive = 128
    local: Positive = 1024
    """Both for contexts of 4,096 tokens and more; in shorter ones the same share of the context."""
    weights: str = ""
    """A safetensors file of `scripts/train_part.py`. Empty: the shipped one, or training when a run starts."""
    steps: Positive = 4
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the routers' weights."""
    trained_on: str | None = resolved()
    """The data of their training."""

    card: ClassVar[Card] = Card(
        name="flux-attention",
        title="Flux Attention: Context-Aware Hybrid Attention for Efficient LLMs Inference",
        idea="A small trained router per layer looks at the queries of a prompt's first and last tokens, once. It "
        "decides whether the layer reads every entry or, also while decoding, only the first and the last ones.",
        arxiv="2604.07394",
        year=2026,
        family="prefill",
        stages=("generation", "retrieval"),
        budget=BudgetKind.PROMPT,
        calibration="a router per layer, trained",
        heads="pooled",
        upstream=Upstream(repo="qqtang-code/FluxAttention", commit="031f22f", license="MIT"),
        deviations=(
            "A sparse layer streams, with first and last blocks; the authors' other two sparse modes are left out.",
            ("Sinks and recent entries are whole blocks in the prompt, as in the authors' code, and as many tokens "
            "later. Blocks are rounded down, to one at least; the authors' code rounds them up. In a context below "
            "4,096 tokens, both are the share of it that they are of 4,096, and blocks are smaller than 128 tokens."),
            ("A router reads the 100 first and the 100 last tokens, the default of the authors' code; their training "
            "script sets 150. Of a shorter prompt it reads every token once; their code reads those in the middle of "
            "101 to 199 tokens twice."),
            ("In training a layer mixes full and sparse attention by a gate between 0 and 1; the authors' gate is 0 or "
            "1, and the gradient passes through it. Every other router starts sparse; the authors' all start full."),
            ("Training pulls the mean share of sparse layers up to a target, and leaves it alone above; the authors "
            "learn a multiplier. The routers of `mini` have the target 0.9 instead of 0.45: one of its five layers "
            "finds keys, so that lower targets are met without a look at the prompt."),
            ("Without a file of weights for the model, the routers are trained when a run starts, on Python's manual; "
            "those of `mini` were trained on text of the tasks (scripts/train_part.py)."),
            "A batch is routed sequence by sequence; the authors' code takes one decision for all.",
            "Layers with a sliding window have no router and stay as they are.",
        ),
        limits=(
            "Every entry is stored, so that memory does not shrink; a later turn keeps the decision of the context.",
            "A question that is asked after the context does not affect the decision.",
            "The routers' weights are not counted as bytes of the cache.",
            "Training leaves out soft caps and learned sinks, so that it sees other attention in a model with them.",
            ("The authors' weights are read from their checkpoints, by the names in their code (routers with two "
            "outputs); no published file has been read yet, and it does not name its model."),
        ),
    )

    graphable: ClassVar[str | None] = "a sparse layer reads a slice of its entries, at places from the host."

    def bind(self, model: Model) -> Self:
        """Find the weights of the routers, or train them."""
        require_inverse_rotation(model, "flux-attention")
        sha256 = find_part(
            self, model, lambda: self._train(model),
            f"Python's manual, {self.steps} steps, {self.sinks} first and {self.local} last entries in blocks of "
            f"{self.block or 'the usual size'}", AUTHORS,
        )
        load_module("flux-attention", model, sha256, lambda: make_routers(model))
        return replace(self, part=sha256, trained_on=get_part(sha256).data)

    def layer(self, index: int) -> LayerKV:
        """A store that knows what a sparse layer reads."""
        del index
        sinks, local = self.stream_blocks()
        size = self.block_size or 1
        return RoutedKV(sinks=sinks * size, local=local * size)

    def stream_blocks(self) -> tuple[int, int]:
        """First and last blocks that a sparse layer reads."""
        if self.block_size is None:
            return 1, 1
        least = max(1, self.scaled(self.sinks, PUBLISHED_LENGTH) // self.block_size)
        return least, max(1, self.scaled(self.local, PUBLISHED_LENGTH) // self.block_size)

    def attend_prompt(self, kv: PromptKV, step: Step) -> Tensor:
        """Route the layer by the prompt, and attend to every entry or to the first and the last ones."""
        assert isinstance(kv, RoutedKV)
        assert self.block_size is not None
        tokens = step.query.shape[2]
        whole = opens(get_module(self.part, nn.ModuleDict)[str(step.layer)], pool_queries(step, tokens))
        kv.whole = tuple(whole.tolist())
        kv.sinks = min(kv.sinks, tokens)  # whole blocks, or a share above 1, may be more than the context
        stream = mark_stream(-(-tokens // self.block_size), *self.stream_blocks(), step.query.device)
        blocks = torch.where(whole[:, None, None], torch.ones_like(stream).tril(), stream)  # [B, n, n]
        return kv.attend_chosen(step, Chosen(self.block_size, blocks[:, None].expand(-1, step.query.shape[1], -1, -1)))

    def least_read_bytes(self, shape: Shape) -> int:
        """Bytes that a decode step reads if every routed layer is sparse."""
        sinks, local = self.stream_blocks()
        entries = min(shape.length, (sinks + local) * (self.block_size or 1))
        return sum(
            shape.layer_bytes(x) * (entries if x.window is None else shape.length) // shape.length
            for x in shape.layers
        )

    def blocks_of(self, model: Model, tokens: int) -> tuple[int, Tensor]:
        """Tokens of a block, and the blocks that a sparse layer reads of a prompt. [n, n] bool"""
        fitted = self.fit(None, model.shape(tokens))
        assert fitted.block_size is not None
        return fitted.block_size, mark_stream(-(-tokens // fitted.block_size), *fitted.stream_blocks(), model.device)

    def _train(self, model: Model) -> Mapping[str, Tensor]:
        """Train on the manual; the second half of each text is its answer."""
        ids = calibration_ids(model, TEXT * 8)
        size = min(TEXT, ids.shape[1])
        return train(
            model, self.steps, SPARSITY, lambda tokens: self.blocks_of(model, tokens),
            lambda step: [draw_halves(ids, size, step)],
        )
