"""LongSpec: a trained layer that reads the full cache drafts tokens (arXiv 2502.17421)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Upstream, resolved
from kvbench.methods.lossless.drafter import Batch, Drafter, train
from kvbench.methods.lossless.proposed import Proposed
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import Rename, check_shapes, find_part, get_part

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

TEXT, ROWS = 128, 4
"""Tokens and texts of a batch, where the drafter is trained when a run starts."""
AUTHORS: Rename = {
    "input_layernorm.weight": "norm_self.weight", "post_self_attention_layernorm.weight": "norm_cross.weight",
    "post_cross_attention_layernorm.weight": "norm_mlp.weight", "self_attn.o_proj.weight": "out.weight",
    "cross_attn.o_proj.weight": "cross_out.weight",
    **{f"mlp.{name}_proj.weight": f"{name}.weight" for name in ("gate", "up", "down")},
    **{
        f"{theirs}_proj.{kind}": f"{own}.{kind}"
        for theirs, own in (
            ("self_attn.q", "query"), ("self_attn.k", "key"), ("self_attn.v", "value"), ("cross_attn.q", "cross_query"),
        ) for kind in ("weight", "bias")
    },
}.get
"""Names of the authors' weights, which are those of the released code; no output depends on cross_attn.k and .v."""
PUBLISHED_WINDOW = 513
"""Tokens that the authors' self-attention reads: 512, and the newest."""
_DRAFTERS: dict[tuple[str | None, int, int | None, str, str, torch.device], Drafter] = {}
"""By hash of the weights, window, layer that is read, hash of the model, element type and device."""


@dataclass(frozen=True)
class LongSpec(Proposed):
    """Proposes tokens by a trained layer over entries of the model."""

    drafts_from_entries: ClassVar[bool] = True

    window: Positive = 64
    """Last tokens that the layer's self-attention reads."""
    weights: str = ""
    """A safetensors file of `scripts/train_part.py`, or of the authors. Empty: the shipped one, or training when a run
    starts."""
    steps: Positive = 40
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the layer's weights."""
    trained_on: str | None = resolved()
    """The data of its training."""

    card: ClassVar[Card] = Card(
        name="longspec",
        version="2",
        title="LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification",
        idea="One trained layer drafts: it attends to the last tokens and to the entries of one of the model's layers. "
        "One pass over the full cache verifies, so that the answer is that of the full cache.",
        arxiv="2502.17421",
        year=2025,
        family="lossless",
        stages=("generation",),
        budget=BudgetKind.NONE,
        calibration="a layer that drafts, trained",
        heads="pooled",
        upstream=Upstream(repo="sail-sg/LongSpec", commit="15e4998", license="MIT"),
        deviations=(
            "One sequence of tokens is drafted; the authors draft a tree.",
            ("The layer's own keys and values depend on ids only, and are computed again for the window of 64 tokens "
            "(the authors': 513) in every step, from stored ids."),
            ("It reads the model's last layer, as the authors' does, unless its weights say otherwise: those of `mini` "
            "read the third of five, which looks up earlier tokens. Over the last layer it learned next to nothing."),
            ("The layer learns the model's own choices from entries before a round of 8 tokens; the authors' learns "
            "the text from entries 1 to 4 tokens back."),
            ("Training starts from the model's first layer and the one that is read; the authors' code starts from "
            "random weights."),
            ("Without a file of weights for the model, the layer is trained when a run starts, on Python's manual; "
            "that of `mini` was trained on text of the tasks (scripts/train_part.py)."),
        ),
        limits=(
            "It stores the full cache and the ids of all tokens: it saves passes, not memory.",
            "The layer's weights are not counted as bytes of the cache.",
            ("Greedy decoding only. Answers equal those of the full cache in float32, and up to near ties in 16 bits, "
            "where a pass over several tokens rounds differently."),
            ("The authors' weights (sail/longspec-QwQ-32B-Preview and others) are read with --set window=513, by the "
            "names in their code. Their layer has biases, no norms of queries and keys, and no final norm before the "
            "output head. No published file has been read yet, and it does not name its model."),
        ),
    )

    def bind(self, model: Model) -> Self:
        """Find the layer's weights, or train it."""
        sha256 = find_part(
            self, model, lambda: self._train(model), f"Python's manual, {self.steps} steps, window {self.window}",
            AUTHORS,
        )
        part = get_part(sha256)
        published = bool(self.weights) and "method" not in part.facts
        if published and self.window != PUBLISHED_WINDOW:
            raise UserError(
                f"The authors' layer reads the last {PUBLISHED_WINDOW} tokens, and window is {self.window}. Use --set "
                f"window={PUBLISHED_WINDOW}."
            )
        reads = range(len(model.layers))[int(part.facts.get("reads", -1))]
        key = sha256, self.window, reads, model.sha256, model.dtype, model.device
        if key not in _DRAFTERS:
            drafter = Drafter(model, self.window, reads, published=published)
            check_shapes("longspec", model, part, {name: tuple(x.shape) for name, x in drafter.state_dict().items()})
            drafter.load_state_dict(dict(part.weights))
            _DRAFTERS[key] = drafter.to(model.device).requires_grad_(requires_grad=False)
        return replace(self, holder=_DRAFTERS[key].reads, part=sha256, trained_on=part.data)

    def propose(self, session: Session, token: Tensor, count: int) -> Tensor:
        """The layer's most likely next tokens, one after the other. [B, count]"""
        store, model = self.held(session), session.model
        drafter = _DRAFTERS[self.part, self.window, self.holder, model.sha256, model.dtype, model.device]
        first = max(0, session.seen + 1 - self.window)
        texts = torch.cat([store.ids[:, first:].long(), token[:, None]], dim=1)
        keys, values = store.keys.float(), store.values.float()  # once per round: in 16 bits this is a copy
        for _ in range(count):
            read, end = texts[:, -self.window :], first + texts.shape[1]
            positions = torch.arange(end - read.shape[1], end, device=texts.device).expand_as(read)
            logits = drafter(model, read, positions, keys, values, 1)
            texts = torch.cat([texts, logits[:, -1].argmax(-1)[:, None]], dim=1)
        return texts[:, texts.shape[1] - count :]

    def _train(self, model: Model) -> Mapping[str, Tensor]:
        """Train on the manual; each text's first quarter is context only."""
        ids = calibration_ids(model, min(TEXT * ROWS * 8, model.max_length * ROWS))
        size = min(TEXT, ids.shape[1] // ROWS)
        generator = torch.Generator().manual_seed(0)

        def draw(step: int) -> Batch:
            del step
            starts = torch.randint(ids.shape[1] - size + 1, (ROWS,), generator=generator).tolist()
            texts = torch.stack([ids[0, start : start + size] for start in starts])
            positions = torch.arange(size, device=texts.device).expand_as(texts)
            return texts, positions >= size // 4, positions

        return train(model, self.window, self.steps, draw)
