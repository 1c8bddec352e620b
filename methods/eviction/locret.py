"""Locret: trained heads score entries as they arrive, and the context is prefilled in blocks under the budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from kvbench.constraints import Positive, Share
from kvbench.engine.timing import now
from kvbench.method import BudgetKind, Card, Method, Moment, Shape, Step, Upstream, resolved
from kvbench.methods.eviction.retaining import collect, gather_inputs, make_heads, split_blocks, train
from kvbench.selection import hide_unseen, protect_last, require_inverse_rotation, top_entries
from kvbench.store import LayerKV
from kvbench.store.layer import SCORE_BYTES
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import find_part, get_module, get_part, load_module, rename_layers

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

HIDDEN = 64
AUTHORS = rename_layers(r"model\.layers\.(\d+)\.self_attn\.(fc[12])\.weight", {"fc1": "0.weight", "fc2": "2.weight"})
"""Names of the authors' weights, which are those of the released code."""
GRID = 1024
"""Scores are multiples of its inverse, so that equal tokens, whose scores differ by rounding, are ties."""
TEXT = 256
"""Tokens of a text, where the heads are trained when a run starts; the last quarter stands for the answer."""


@dataclass(frozen=True)
class Locret(Method):
    """Keeps the entries that trained heads score highest, after every block of the context."""

    block: Positive = 1024
    """Tokens of the context between two evictions."""
    local: Positive = 100
    """Last tokens of the context, which are always kept; at most a quarter of the budget."""
    stabilizers: Share = 0.15
    """Share of the budget for the last tokens before the next block, which stay until then."""
    weights: str = ""
    """A safetensors file of `scripts/train_part.py`. Empty: the shipped one, or training when a run starts."""
    steps: Positive = 100
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the heads' weights."""
    trained_on: str | None = resolved()
    """The data of their training."""

    card: ClassVar[Card] = Card(
        name="locret",
        title="Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads",
        idea="A small trained network per layer scores an entry when it arrives, from query, key and value. The "
        "context is run in blocks, and after each only the best entries stay, so memory stays bounded.",
        arxiv="2410.01805",
        year=2024,
        family="eviction",
        stages=("generation", "compression"),
        budget=BudgetKind.STORED,
        calibration="a network per layer that scores entries, trained",
        heads="pooled",
        upstream=Upstream(repo="huangyuxiang03/Locret", commit="28995c5", license=None),
        deviations=(
            ("Entries keep their own positions; the authors' cache stores unrotated keys and rotates them by their "
            "places in it."),
            "The networks have 64 hidden units; the authors' have 1,024.",
            ("Both terms of the training loss are means over layers; the authors' code sums the term that smooths "
            "scores, so that it weighs more by the number of layers. The learning rate is 3e-3 after 50 steps; theirs "
            "is 5e-4 after 2,000."),
            ("The last tokens are run with the last block, before it is evicted, so that a context of one block is "
            "exact; the authors run them after it."),
            "Scores are rounded to multiples of 1/1024; of equal ones the first entry stays.",
            ("Defaults follow the authors' for Llama-3.1-8B (blocks of 1,024, 100 last tokens, stabilizers of 15 % of "
            "the budget), with the last tokens inside the budget and at most a quarter of it."),
            ("Without a file of weights for the model, the networks are trained when a run starts, on Python's manual; "
            "those of `mini` were trained on text of the tasks (scripts/train_part.py)."),
        ),
        limits=(
            "Scores are those of the context alone: a question that is asked later does not affect the choice.",
            "Later blocks are run on the entries that are left, so the prefill of several blocks is not exact.",
            "Entries after the context are kept.",
            "The networks' weights are not counted as bytes of the cache; every entry's score is.",
            ("The authors' weights (hyx21/Locret-llama-3.1-8B-instruct, converted to safetensors) are read by the "
            "names in their code, for models with one matrix each for queries, keys and values; no published file "
            "has been read yet, and it does not name its model."),
        ),
    )

    recompressible: ClassVar[str | None] = "scores are made while the context is run, and later tokens have none."

    def minimum_entries(self) -> int:
        """Room for a last token, a stabilizer and two others."""
        return 4

    def bind(self, model: Model) -> Self:
        """Find the weights of the heads, or train them."""
        require_inverse_rotation(model, "locret")
        sha256 = find_part(self, model, lambda: self._train(model), f"Python's manual, {self.steps} steps", AUTHORS)
        first = get_part(sha256).weights.get("0.0.weight")
        load_module("locret", model, sha256, lambda: make_heads(model, HIDDEN if first is None else len(first)))
        return replace(self, part=sha256, trained_on=get_part(sha256).data)

    def layer(self, index: int) -> LayerKV:
        """A store with a score for every entry."""
        del index
        return LayerKV(entry_state=("score",))

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room for later tokens, with a score for every entry."""
        return super().later_bytes(shape, tokens) + tokens * SCORE_BYTES * sum(x.kv_heads for x in shape.layers)

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context in blocks, evict after each, and then run the last tokens. [B, V]"""
        ids = torch.cat(list(chunks), dim=1)
        length, size = ids.shape[1], session.chunk or ids.shape[1]
        if self.rows is None or self.rows >= length:
            return session.run_chunks(ids.split(size, dim=1), Moment.CONTEXT_END)
        whole = [store.capacity for store in session.layers]
        for start, end in split_blocks(length, self.block):
            ended = end == length
            for store, capacity in zip(session.layers, whole, strict=True):
                store.capacity = capacity if ended else end  # room for this block and no more
                if start:
                    store.reserve(end - start, end - start)
            moment = Moment.CONTEXT_END if ended else Moment.CONTEXT_CHUNK
            logits = session.run_chunks(ids[:, start:end].split(size, dim=1), moment)
            started = now(ids.device)
            for store, layer in zip(session.layers, session.model.layers, strict=True):
                self._trim(store, layer.window, ended=ended)
            session.compress_seconds += now(ids.device) - started
        return logits

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry left; scores the context's new entries. [B, H_q, T, D_v]"""
        if step.moment.in_context and self.rows is not None:
            kv.get_entry_state("score")[:, :, kv.n - step.key.shape[2] :] = self.predict(step)
        return kv.attend(step)

    def predict(self, step: Step) -> Tensor:
        """Scores of the new entries. [B, H_kv, T]"""
        scores: Tensor = get_module(self.part, nn.ModuleList)[step.layer](gather_inputs(step))
        return (scores.mT * GRID).round() / GRID

    def _trim(self, store: LayerKV, window: int | None, *, ended: bool) -> None:
        """Keep the last tokens and the best others. ended: whether that was the context's last block."""
        entries = self.in_window(self.rows, window)
        assert entries is not None
        if entries >= store.n:
            return
        scores = hide_unseen(store.get_entry_state("score"), store, window)
        last = max(1, min(self.local, entries // 4) if ended else int(self.stabilizers * entries))
        store.keep(top_entries(protect_last(scores, last), entries))

    def _train(self, model: Model) -> Mapping[str, Tensor]:
        """Train on the manual."""
        ids = calibration_ids(model, TEXT * 8)
        size = min(TEXT, ids.shape[1])
        texts = [(x, size * 3 // 4) for x in ids.split(size, dim=1) if x.shape[1] == size]
        return train(model, collect(model, texts), HIDDEN, self.steps)
