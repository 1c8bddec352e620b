"""QuantSpec: the upper 4 bits of an 8-bit cache draft, and all 8 bits verify."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from kvbench.constraints import Positive
from kvbench.engine.speculation import draft_with, find_stores, speculate
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream
from kvbench.methods.baseline.full import Full
from kvbench.methods.lossless.verified import Verified
from kvbench.store import LayerKV
from kvbench.store.hierarchical import HierarchicalKV, HierarchicalPairKV
from kvbench.store.verified import VerifiedKV

if TYPE_CHECKING:
    from kvbench.engine.autoregressive import Tokens
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class EightBits(Full):
    """Greedy decoding over both halves, which codes entries as soon as they are old enough."""

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Code entries that are old enough."""
        assert isinstance(kv, HierarchicalKV)
        if step.moment.is_last:
            kv.flush()


@dataclass(frozen=True)
class QuantSpec(Verified):
    """Stores entries once, in two halves of 4 bits; the newest one or two groups stay exact."""

    draft_length: Positive = 4
    """Most tokens that are drafted in a round."""
    group: Positive = 32
    """Tokens that share a key channel's scale, most channels that share a value's scale, and the fewest exact entries.
    """

    recompressible: ClassVar[str | None] = "entries are coded once, when they are old enough."
    card: ClassVar[Card] = Card(
        name="quantspec",
        version="2",
        title="QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
        idea="An 8-bit code is an upper half that is a 4-bit code of its own, and a lower half that refines it. The "
        "upper halves draft tokens and both halves verify them, so that one cache serves both.",
        arxiv="2502.10424",
        year=2025,
        family="lossless",
        stages=("generation", "compression"),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="rishabh-16/QuantSpec", commit="b2c3747", license=None),
        deviations=(
            "The draft runs the model's own weights; the paper's runs them in 4 bits.",
            ("No round goes on behind the token with which a group becomes codes: its next tokens would see the group "
            "exact, and one at a time they see codes."),
            "The draft length is 4. The paper searches it for each data set, and mostly finds 4 or 6.",
            ("Scales of the upper halves are rounded up and minima down to float16, so that codes cover the range; the "
            "authors' code rounds both to nearest."),
            ("Groups have 32 tokens, so that short contexts are coded, too, and the paper's 128; the buffer of exact "
            "entries is one to two groups, as in the paper's double buffer."),
        ),
        limits=(
            ("Answers equal those of greedy decoding with the 8-bit cache, which is not the full cache: the agreement "
            "with the full cache states the difference."),
            "In plain PyTorch codes are expanded before every attention, so a step is slower than with the full cache.",
            "Greedy decoding only.",
            ("The code is the first author's; the repository of the authors' group, SqueezeAILab/QuantSpec, has only a "
            "README."),
        ),
    )

    @cached_property
    def drafter(self) -> Method:
        """Attention over the upper halves; nothing is evicted."""
        return Full()

    def fit(self, budget: Budget | None, shape: Shape) -> QuantSpec:
        """Accept only the budget that the settings reach (`UserError`)."""
        for width in sorted({x.value_dim for x in shape.layers}):
            if width % min(self.group, width):
                raise UserError(
                    f"quantspec: group={self.group} does not divide the {width} channels of a value. Use a divisor of "
                    f"{width}, or {width} or more."
                )
        return super().fit(budget, shape)

    def layer(self, index: int) -> LayerKV:
        """One store for both caches."""
        del index
        return HierarchicalPairKV(target=HierarchicalKV(group=self.group))

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Code entries that are old enough, from the end of the context on."""
        assert isinstance(kv, VerifiedKV) and isinstance(kv.target, HierarchicalKV)
        if step.moment.is_last:
            kv.target.flush()

    def generate(self, session: Session, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
        """Draft and verify in rounds that end where a group becomes codes."""
        targets = [x.target for x in find_stores(session)]

        def propose(token: Tensor, count: int) -> Tensor:
            # Sliding layers may hold another number of exact entries. The newest token is run with the draft.
            room = min(2 * self.group - 1 - x.n for x in targets)
            return draft_with(session, self.drafter, token, min(count, room))

        return speculate(session, propose, self.draft_length, max_new_tokens, stop, follow=self.follow)

    def target(self, session: Session) -> Session | None:
        """The session of the cache that verifies, with its codes of later tokens."""
        return session.over([x.target for x in find_stores(session)], EightBits(), type(session))

    def identity(self, shape: Shape) -> bool:
        """Whether no entry is old enough to be coded."""
        return shape.length < 2 * self.group

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of both halves and of the exact entries."""
        store = HierarchicalKV(group=self.group)
        return sum(store.bytes_for(x, shape, shape.entries(x)) for x in shape.layers)

    def running_bytes(self, shape: Shape) -> int:
        """None: one store serves both caches."""
        del shape
        return 0

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room for codes, and for the exact entries that are not there yet: of four groups at least one is."""
        return Method.later_bytes(self, shape, tokens + 3 * self.group)

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes of a token if every drafted one is rejected."""
        store = HierarchicalKV(group=self.group)
        upper = sum(store.upper_bytes_for(x, shape, shape.entries(x)) for x in shape.layers)
        return self.draft_length * upper + self.declared_bytes(shape)

    def minimum_entries(self) -> int:
        """The least context of which a group is coded."""
        return 2 * self.group
