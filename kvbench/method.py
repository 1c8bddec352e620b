"""The base class of methods and their cards; re-exports the names that the author of a method imports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from kvbench.budget import BUDGET_TOLERANCE, DEFAULT_BUDGET, Budget, BudgetKind, LayerShape, Shape, too_small
from kvbench.constraints import setting_fields, validate
from kvbench.errors import UserError
from kvbench.step import Moment, Step

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.engine.autoregressive import Tokens
    from kvbench.engine.session import Session
    from kvbench.hf import Model
    from kvbench.store import LayerKV

__all__ = [
    "Budget", "BudgetKind", "Card", "LayerShape", "Method", "ModelKind", "Moment", "Shape", "Step",
    "Upstream", "resolved",
]


ModelKind = Literal["autoregressive", "diffusion"]


class Upstream(BaseModel):
    """The reference code of a method."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repo: str
    commit: str | None
    license: str | None


class Card(BaseModel):
    """Description of a method. Fields without a default are required; `None` means unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    version: str = "1"
    title: str
    models: ModelKind = "autoregressive"
    """The kind of model that it works on."""
    idea: str
    """Two sentences."""
    arxiv: str | None
    year: int | None
    family: str
    stages: tuple[str, ...]
    """SCBench's stages of the cache that it changes. generation: how and when entries are computed, in the context,
    in drafts and in steps of diffusion. compression: which entries are stored, and in how many bits, also while
    decoding. retrieval: which stored entries a token reads. loading: entries come from another prompt, the host or a
    file.
    """
    budget: BudgetKind
    calibration: str | None = None
    """Measurements on the model, or training, before a run; None: neither. It ends in `, trained` after training on the
    tasks' train split, and in `, trained on` and the name of the text after training on another.
    """
    paper_budget: str | None = None
    """The budget that `--budget paper` uses."""
    heads: Literal["independent", "pooled", "indexed"]
    """Whether a head's kept entries depend on that head alone, on all heads, or on the head's number."""
    upstream: Upstream | None
    deviations: tuple[str, ...] = ()
    """Where this differs from the paper or its code."""
    unverified: tuple[str, ...] = ()
    """Guesses that are settings."""
    limits: tuple[str, ...] = ()
    """Where it does not apply."""


def name_preparation(calibration: str | None) -> Literal["", "calibrated", "trained"]:
    """Whether a method is calibrated or trained before a run, from the `calibration` of its card."""
    return "" if calibration is None else "trained" if ", trained" in calibration else "calibrated"


def resolved(*, by_bind: bool = False) -> Any:
    """A dataclass field that `fit` or `bind` fills in; not a setting. by_bind: a session is refused without it."""
    return field(default=None, kw_only=True, metadata={"resolved": True, "by_bind": by_bind})


class Round(NamedTuple):
    """A round of drafting and verification of which every drafted token is accepted."""

    drafted: int
    """Tokens; verification adds one more."""
    passes: int
    """Of the model."""
    read_bytes: int
    """Of entries, in all passes."""


@dataclass(frozen=True)
class Method:
    """A technique. Fields are its settings; everything that changes during a run is kept in the layer's store.

    An author overrides only what the paper changes.
    """

    card: ClassVar[Card]
    graphable: ClassVar[str | None] = None
    """None: one decode step has static shapes. Otherwise the reason why not."""
    stepwise: ClassVar[bool] = False
    """Whether tokens run one at a time, because a step may evict or quantize. A class with a reason in `graphable` has
    True, and so do its subclasses."""
    recompressible: ClassVar[str | None] = None
    """None: it may be asked to compress again after every question. Otherwise why that is refused."""
    replays_context: ClassVar[bool] = False
    """Whether `prefill` does more than run the context once, chunk by chunk. A subclass that overrides `prefill` has
    True unless it says otherwise."""
    generates_alone: ClassVar[bool] = False
    """Whether `generate` is overridden: such answers are not generated in a batch."""
    prepares_questions: ClassVar[bool] = False
    """Whether `begin_question` is overridden: such a method does not draft for another one."""
    shares_layers: ClassVar[bool] = False
    """Whether a layer leaves tensors for later layers of the same pass, in `step.shared`."""
    inexact_prefill: ClassVar[str | None] = None
    """None: logits after the context are the full cache's. Otherwise why they are not."""
    reads_hidden: ClassVar[bool] = False
    """Whether it reads `step.hidden`."""
    skips_layers: ClassVar[bool] = False
    """Whether tokens of the context skip layers (`choose_tokens`)."""
    reads_parts: ClassVar[bool] = False
    """Whether it reuses entries of the context's parts, which the task must name."""
    reads_question: ClassVar[bool] = False
    """Whether it reads the question in the prompt, and cannot run without one."""
    rows: int | None = resolved()
    """Entries per KV head of a full-attention layer that the budget amounts to; None: all."""
    length: int | None = resolved()
    """Tokens of the context that the budget was fitted to."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vars(cls).get("graphable") is not None:
            cls.stepwise = True
        if "prefill" in vars(cls) and "replays_context" not in vars(cls):
            cls.replays_context = True
        if "generate" in vars(cls):
            cls.generates_alone = True
        if "begin_question" in vars(cls):
            cls.prepares_questions = True

    def __post_init__(self) -> None:
        """Refuse settings that break the constraints of their fields (`UserError`).

        A subclass that checks settings against each other calls its parent's first.
        """
        validate(self, self.card.name if hasattr(self, "card") else type(self).__name__)

    def require_recompressible(self) -> None:
        """Refuse to compress again after a question (`UserError`), where that cannot be or would do nothing."""
        if self.recompressible is not None:
            raise UserError(
                f"{self.card.name} cannot compress again at every turn: {self.recompressible} Leave --recompress out."
            )

    def require_bound(self) -> None:
        """Refuse a session before `bind` (`UserError`), where the method takes something from the model."""
        missing = [x.name for x in fields(self) if x.metadata.get("by_bind") and getattr(self, x.name) is None]
        if missing:
            raise UserError(
                f"{self.card.name} is not bound to a model: its {' and '.join(missing)} are found on one. Use "
                "method.bind(model).fit(budget, shape), and open the session with that."
            )

    @property
    def budget_kind(self) -> BudgetKind:
        """The budget kind of these settings; the card's unless a setting changes it."""
        return self.card.budget

    @property
    def calibration(self) -> str | None:
        """Measurements or training before a run with these settings; the card's unless a setting changes it."""
        return self.card.calibration

    @property
    def own_card(self) -> Card:
        """The card with the calibration of these settings, as a result has it."""
        return self.card.model_copy(update={"calibration": self.calibration})

    @property
    def is_exact(self) -> bool:
        """Whether its card declares that logits are the full cache's, so that nothing is compared."""
        return self.budget_kind is BudgetKind.NONE and not self.reads_parts

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """The method `inner+this`: this one around another.

        Raises:
            UserError: the two make no sense together.
        """
        name = cls.card.name
        hint = f"Use {inner.card.name} or {name} alone."
        if inner.over.__func__ is not Method.over.__func__:  # type: ignore[attr-defined]  # of a class method
            hint = f"The outer method stands last: {name}+{inner.card.name}."
        raise UserError(f"{inner.card.name}+{name} makes no sense: {name} goes around no other method. {hint}")

    @property
    def settings(self) -> dict[str, object]:
        """The settings by name, as `--set` takes them."""
        return {name: getattr(self, name) for name in setting_fields(type(self))}

    @property
    def resolution(self) -> dict[str, object]:
        """The values that `fit` and `bind` resolved, by name."""
        found = {x.name: getattr(self, x.name) for x in fields(self) if x.metadata.get("resolved")}
        return {name: value for name, value in found.items() if value is not None}

    def check_budget(self, budget: Budget | None) -> None:
        """Refuse a budget that no model and length could give a meaning (`UserError`)."""
        name = self.card.name
        if self.budget_kind in (BudgetKind.NONE, BudgetKind.PROMPT) and budget not in (None, Budget("fraction", 1.0)):
            raise UserError(
                f"{name} takes no budget, got {budget}. Leave --budget out; in a sweep, give it a [[grid]] of its own."
            )
        if budget is not None and budget.kind == "paper" and self.card.paper_budget is None:
            decided = self.budget_kind is BudgetKind.BITS  # by its settings
            step = "Leave --budget out." if decided else "Use a share (25%) or tokens per KV head (1024)."
            raise UserError(f"{name} has no paper budget on its card. {step}")

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve a budget for this model and length; None stands for the default.

        Raises:
            UserError: what was asked cannot be reached; the message names what can.
        """
        self.check_budget(budget)
        card = self.card
        if self.budget_kind in (BudgetKind.NONE, BudgetKind.PROMPT):
            return self
        if self.budget_kind is BudgetKind.BITS:
            reached = self.declared_bytes(shape) / shape.full_bytes
            if budget is not None and (budget.kind != "fraction" or abs(budget.value - reached) > BUDGET_TOLERANCE):
                raise UserError(
                    f"{card.name} cannot reach a budget of {budget}: its settings amount to {reached:.1%} of the full "
                    "cache. Leave --budget out, or change its settings with --set."
                )
            return self
        budget = budget or DEFAULT_BUDGET
        if budget.kind == "paper":
            assert card.paper_budget is not None
            budget = Budget.parse(card.paper_budget)
        if budget == Budget("fraction", 1.0):
            return replace(self, rows=None, length=shape.length)
        rows = round(budget.value * shape.length) if budget.kind == "fraction" else int(budget.value)
        least = min(self.minimum_entries(), shape.length)
        if rows < least:
            raise too_small(card.name, budget, rows, shape.length, least)
        return replace(self, rows=rows, length=shape.length)

    def minimum_entries(self) -> int:
        """The fewest entries per KV head that the settings allow."""
        return 1

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """Budget of a layer in entries per KV head; sliding layers keep the same share of their window."""
        del layer  # equal for all, unless a method allocates
        return self.in_window(self.rows, window)

    def in_window(self, entries: int | None, window: int | None) -> int | None:
        """The share of a sliding window's tokens that this many entries are of the context's."""
        if entries is None or self.length is None or window is None or self.sees_context(window):
            return entries
        return min(window, max(self.minimum_entries(), math.ceil(entries * window / self.length)))

    def sees_context(self, window: int | None) -> bool:
        """Whether a layer sees the whole context: there is no window, or the context is no longer than it."""
        return window is None or (self.length is not None and window >= self.length)

    def identity(self, shape: Shape) -> bool:
        """Whether these settings are declared to lose nothing of a context of this length."""
        if self.budget_kind is BudgetKind.NONE:
            return True
        if self.budget_kind in (BudgetKind.BITS, BudgetKind.PROMPT):
            return False
        return self.rows is None or self.rows >= shape.length

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes that hold the context right after compression, by formula; the ledger measures them."""
        total = 0
        for index, layer in enumerate(shape.layers):
            held, budget = shape.entries(layer), self.entries_in(index, layer.window)
            total += self.layer_bytes(index, shape, held if budget is None else min(held, budget))
        return total

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Declared bytes of a layer that keeps this many entries per KV head."""
        return self.layer(index).bytes_for(shape.layers[index], shape, entries)

    def skipped_tokens(self, parts: Sequence[int]) -> int:
        """Tokens of a context that are never run. parts: tokens of each of its parts; none if the task names none."""
        del parts
        return 0

    def declared_host_bytes(self, shape: Shape) -> int:
        """Bytes of the context in host memory, in addition to `declared_bytes`."""
        del shape
        return 0

    def declared_file_bytes(self, shape: Shape) -> int:
        """Bytes of the context in a file, in addition to `declared_bytes`."""
        del shape
        return 0

    def shared_bytes(self, shape: Shape) -> int:
        """The part of `declared_bytes` that the sequences of a batch share."""
        del shape
        return 0

    def copied_bytes(self, shape: Shape) -> int:
        """Bytes of the context that every fork copies, where its stores share the entries."""
        del shape
        return 0

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Upper bound of the room for this many later tokens: full-precision entries and the method's own data."""
        return -(-tokens * max(shape.full_bytes, self.declared_bytes(shape)) // shape.length)

    def running_bytes(self, shape: Shape) -> int:
        """Bytes next to keys and values while the context is run: by default those that the stores keep for scoring."""
        return sum(self.layer(index).running_bytes(layer, shape) for index, layer in enumerate(shape.layers))

    def declared_read_bytes(self, shape: Shape) -> int:
        """Upper bound of the bytes that one decode step reads right after the context."""
        return self.declared_bytes(shape)

    def least_read_bytes(self, shape: Shape) -> int:
        """Lower bound of the bytes that one decode step reads; the upper one unless reads depend on the entries."""
        return self.declared_read_bytes(shape)

    def round(self, shape: Shape) -> Round | None:
        """A round right after the context; None: every pass gives one token."""
        del shape
        return None

    def bind(self, model: Model) -> Self:
        """Compute what depends on the model: calibration, gates, head profiles (cached by the model's hash)."""
        del model
        return self

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Restore what `bind` computed from a saved result, to verify a submission without loading the model.

        Raises:
            UserError: the saved values do not fit a model of this shape.
        """
        del resolution, shape
        return self

    def layer(self, index: int) -> LayerKV:
        """Return an empty store for one layer."""
        from kvbench.store import LayerKV  # here, so that listing methods does not import torch

        del index
        return LayerKV()

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Compute the attention output of the new tokens, whose entries are already stored. [B, H_q, T, D_v]"""
        return kv.attend(step)

    def choose_tokens(self, layer: int, ids: Tensor, shared: Mapping[str, Tensor]) -> Tensor | None:
        """The tokens of a context that a layer runs, ascending [B, m]; None: all. Called before the layer.

        ids: of the pass [B, T]. shared: what earlier layers left in `step.shared`.
        """
        del layer, ids, shared
        return None

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Decide which entries stay; called after every attention. `step.moment.compresses` at the context's end."""

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """Decide across the layers up to this one, after `evict` where the method compresses; may trim earlier layers.

        layers: all stores; those after `step.layer` do not hold the end of the context yet.
        """

    def end_of_context(self, session: Session) -> None:
        """Decide across layers, after the last layer of the context's last chunk."""

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context. Logits of the last position. [B, V]"""
        return session.run_chunks(chunks, Moment.CONTEXT_END)

    def begin_question(self, session: Session, ids: Tensor) -> None:
        """Prepare for a question, before it is run. Not called where the context held the question. ids: [B, T]"""

    def generate(self, session: Session, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
        """Generate tokens from the session's last logits, greedily."""
        return session.greedy(max_new_tokens, stop)

    def target(self, session: Session) -> Session | None:
        """The session whose greedy answers the method promises to give; None: it gives its own."""
        del session
        return None
