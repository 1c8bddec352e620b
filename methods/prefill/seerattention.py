"""SeerAttention: trained gates predict, from pooled queries and keys, which blocks of a prompt's attention matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor, nn

from kvbench.constraints import Natural, Positive, Share
from kvbench.method import BudgetKind, Card, Step, Upstream, resolved
from kvbench.methods.prefill.attention_gate import collect, make_gates, pool, train
from kvbench.selection import require_inverse_rotation
from kvbench.store.prompt import Chosen
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import find_part, get_module, get_part, load_module, rename_layers
from kvbench.techniques.sparse_prefill import SparsePrefillMethod, cover_mass, first_and_own

if TYPE_CHECKING:
    from kvbench.hf import Model

AUTHORS = rename_layers(
    r"model\.layers\.(\d+)\.self_attn\.attn_gate\.mask_linear_([qk])\.weight", {"q": "query", "k": "key"}
)
"""Names of the authors' weights, which are those of the released code."""
TEXT, BLOCKS = 256, (4, 16)
"""Tokens of a text and of its blocks, where the gates are trained when a run starts."""


@dataclass(frozen=True)
class SeerAttention(SparsePrefillMethod):
    """Computes, for every block of queries, the fewest blocks with the share `cover` of the gate's prediction."""

    cover: Share = 0.95
    """Share of a row's predicted attention that its blocks hold."""
    dense: Natural = 2
    """Last rows of blocks that are computed whole."""
    weights: str = ""
    """A safetensors file of `scripts/train_part.py`. Empty: the shipped one, or training when a run starts."""
    steps: Positive = 100
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the gates' weights."""
    trained_on: str | None = resolved()
    """The data of their training."""

    card: ClassVar[Card] = Card(
        name="seerattention",
        title="SeerAttention: Learning Intrinsic Sparse Attention in Your LLMs",
        idea="A small gate per head learns from the model's own attention which blocks matter: it compares projections "
        "of pooled queries and keys. Only the blocks that it names are computed in the prompt.",
        arxiv="2410.13276",
        year=2024,
        version="2",
        family="prefill",
        stages=("generation",),
        budget=BudgetKind.PROMPT,
        calibration="a gate per head that predicts the attention of blocks, trained",
        heads="indexed",
        upstream=Upstream(
            repo="microsoft/SeerAttention", commit="aba03e3f2caefd0ccd21e576670aa830b748c84e", license="MIT"
        ),
        deviations=(
            ("A row computes the fewest blocks that hold a share of the prediction, the first and the own one "
            "included; the authors take those above a threshold, or a fixed number."),
            ("A last, partial block counts its last token as often as it takes to fill it; the authors pool over its "
            "own tokens."),
            ("The loss is summed over the blocks of a row; the authors' is the mean over all pairs of blocks, which is "
            "a fixed share of it."),
            "The loss has all rows; the authors' leaves out the first quarter.",
            "Gates are as wide as a head and have the layer's rotary embedding; the authors' are 128 wide.",
            ("Gates that are trained here project queries, and have one projection of keys per KV head. The authors' "
            "gates that are as wide as a head leave queries as they are, and have one of keys per query head."),
            ("Without a file of weights for the model, the gates are trained when a run starts, on Python's manual; "
            "those of `mini` were trained on text of the tasks (scripts/train_part.py)."),
            ("One gate serves blocks of 64 tokens and the smaller ones of short contexts; the authors train for blocks "
            "of 64 alone."),
        ),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            "The gates' weights are not counted as bytes of the cache.",
            "Training leaves out soft caps and learned sinks, so that it sees other attention in a model with them.",
            ("The authors' weights (attn_gate_weights.pth, converted to safetensors, of gates Qavg_Kmaxminavg, as wide "
            "as a head) are read by the names in their code; no published file has been read yet, and it does not name "
            "its model."),
            "It saves arithmetic in the prompt, not memory: every entry is stored, and decode steps read all of them.",
            "The context runs in one pass, whatever --chunk says.",
        ),
    )

    published_block: ClassVar[int] = 64

    def bind(self, model: Model) -> Self:
        """Find the weights of the gates, or train them."""
        require_inverse_rotation(model, "seerattention")
        sha256 = find_part(self, model, lambda: self._train(model), f"Python's manual, {self.steps} steps", AUTHORS)
        weights = get_part(sha256).weights
        load_module("seerattention", model, sha256, lambda: make_gates(
            model, projects_queries="0.query" in weights, key_heads=len(weights["0.key"]) if "0.key" in weights else 0
        ))
        return replace(self, part=sha256, trained_on=get_part(sha256).data)

    def choose(self, query: Tensor, key: Tensor, step: Step) -> Chosen:
        """The first block, the own one, and those with the largest predictions; the last rows whole."""
        del query, key
        assert self.block_size is not None
        *pooled, positions = pool(step, self.block_size)
        shares = get_module(self.part, nn.ModuleList)[step.layer](*pooled, step.rope, positions).exp()  # [B, H_q, c, c]
        blocks = cover_mass(shares, self.cover, first_and_own(shares.shape[2], shares))
        blocks[:, :, max(0, blocks.shape[2] - self.dense) :] = True
        return Chosen(self.block_size, blocks)

    def _train(self, model: Model) -> Mapping[str, Tensor]:
        """Train on the manual."""
        ids = calibration_ids(model, TEXT * 8)
        size = min(TEXT, ids.shape[1])
        texts = [x for x in ids.split(size, dim=1) if x.shape[1] == size]
        return train(model, collect(model, texts, BLOCKS), self.steps)
