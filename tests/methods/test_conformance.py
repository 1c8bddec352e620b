"""Every claim of the conformance suite on every method, and a planted fault for every claim."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from kvbench.check import INVARIANTS, NotApplicableError, check
from kvbench.hf import tiny
from kvbench.method import BudgetKind, Card, Method, Moment
from kvbench.registry import find_method
from kvbench.selection import ScoredMethod, protect_last
from kvbench.store import LayerKV
from kvbench.techniques.reuse import ApartMethod

from .conftest import AUTOREGRESSIVE, COMPOSED

MEASURED = {"measured bytes are declared", "evicted entries are freed"}
QUICK = {"settings are frozen", *MEASURED}
"""Claims that `make test` tries on every method; the others take ten times longer. The golden outputs, of which it
checks all, show that every method acts, and that its answers are those recorded."""

LEARNING = {
    "a2ats", "compresskv", "dms", "duo-attention", "kvquant", "locret", "longspec", "minference", "s2o",
    "seerattention",
}
"""They first learn or measure something of each model, for up to two seconds; `make test` compares their bytes with
the golden outputs."""


def is_quick(name, claim):
    """Whether `make test` tries the claim on the method."""
    return claim in QUICK and name not in COMPOSED and not (claim in MEASURED and name in LEARNING)


@pytest.mark.parametrize(("name", "claim"), [
    pytest.param(x, claim, marks=() if is_quick(x, claim) else pytest.mark.slow)
    for x in [*AUTOREGRESSIVE, *COMPOSED] for claim in INVARIANTS
])
def test_claim(name, claim):
    """The claim holds for the method, or does not apply and says why."""
    try:
        assert INVARIANTS[claim](find_method(name)())
    except NotApplicableError as reason:
        assert str(reason)  # noqa: PT017  # a reason is what is asked for


# Planted faults


def card(name="faulty", heads="independent", budget=BudgetKind.STORED):
    """A card for a method that no one published."""
    return Card(
        name=name, title=name, idea="Has one fault.", arxiv=None, year=None, family="test", stages=(), budget=budget,
        heads=heads, upstream=None,
    )


@dataclass(frozen=True)
class Honest(ScoredMethod):
    """Keeps the entries with the largest keys and the last four; without fault."""

    card: ClassVar[Card] = card("honest")

    def minimum_entries(self):
        """The last four and one to choose."""
        return 5

    def score(self, kv, step):
        """The norm of the key. [B, H_kv, n]"""
        return protect_last(kv.keys.norm(dim=-1), 4)


class Fault:
    """Faulty methods by the claim that must catch them."""

    def __init__(self):
        self.planted = []

    def __call__(self, claim, message):
        """Register a class under a claim, and what the claim's failure must say."""

        def plant(cls):
            self.planted.append((claim, cls, message))
            return cls

        return plant


fault = Fault()
LEFT_BEHIND = []


@dataclass(frozen=True)
class Sized(Honest):
    """Has a setting."""

    size: int = 1


@fault("settings are frozen", "setting size can be changed")
class Thawed(Sized):
    """Its settings can be assigned."""

    def __setattr__(self, name, value):
        """Change it."""
        object.__setattr__(self, name, value)


@fault("settings are frozen", "`fit` changed the method")
@dataclass(frozen=True)
class FitsItself(Honest):
    """Resolves the budget into itself."""

    def fit(self, budget, shape):
        """Change what is there."""
        object.__setattr__(self, "rows", 30)
        return super().fit(budget, shape)


@fault("identity at full budget", "logits differ")
@dataclass(frozen=True)
class Louder(Honest):
    """Its attention is a ten-thousandth too large."""

    def attend(self, kv, step):
        """Attend, almost."""
        return super().attend(kv, step) * 1.0001


@fault("identity at full budget", "tokens|logits differ")
@dataclass(frozen=True)
class OffByOne(Honest):
    """Loses an entry at its full budget too."""

    def evict(self, kv, step):
        """Keep all but the first."""
        if step.moment.compresses and self.rows is None:
            kv.keep(torch.arange(1, kv.n).expand(*kv.keys.shape[:2], -1))
        super().evict(kv, step)


@fault("identity at full budget", "no quantized entry")
@dataclass(frozen=True)
class NeverTheSame(Louder):
    """Says that it is not the full cache at its full budget either, so as not to be compared with it."""

    def identity(self, shape):
        """Never."""
        return False


@fault("first token is exact", "logits differ")
@dataclass(frozen=True)
class Early(Honest):
    """Compresses before the attention of the context's last chunk."""

    def attend(self, kv, step):
        """Evict, then attend one query at a time to what is left."""
        super().evict(kv, step)
        return kv.attend(step)

    def evict(self, kv, step):
        """Done already."""


@fault("acts at its budget", "no effect")
@dataclass(frozen=True)
class Idle(Honest):
    """Does nothing and says it keeps to a budget."""

    def evict(self, kv, step):
        """Keep everything."""


@fault("acts at its budget", "counts as the declared identity")
@dataclass(frozen=True)
class SaysActed(Honest):
    """Does nothing, and its settings claim to be those that need not."""

    def evict(self, kv, step):
        """Keep everything."""

    def identity(self, shape):
        """Always."""
        return True


@fault("measured bytes are declared", "measured .* bytes, declared")
@dataclass(frozen=True)
class Modest(Honest):
    """Declares a byte less per entry than it stores."""

    def layer_bytes(self, index, shape, entries):
        """Too few."""
        return super().layer_bytes(index, shape, entries) - entries


@fault("measured bytes are declared", "measured .* bytes, declared")
@dataclass(frozen=True)
class Hoarder(Honest):
    """Keeps a copy of its keys that it does not declare."""

    def evict(self, kv, step):
        """Copy first."""
        kv.state["copy"] = kv.keys.clone()
        super().evict(kv, step)


@fault("measured bytes are declared", "measured .* bytes, declared")
@dataclass(frozen=True)
class ViewKeeper(Honest):
    """Keeps a view of the whole block, which keeps all of it alive."""

    def evict(self, kv, step):
        """One entry, and with it every other."""
        if step.moment.compresses:
            kv.state["first"] = kv.keys[:, :, :1]
        super().evict(kv, step)


@fault("measured bytes are declared", r"LayerKV\.copy holds \d+ bytes that its tensors\(\) does not list")
@dataclass(frozen=True)
class Unlisted(Honest):
    """Keeps a copy of all keys in an attribute of the store, which does not count it."""

    def evict(self, kv, step):
        """Copy first."""
        if step.moment.compresses:
            kv.copy = [kv.keys.clone()]
        super().evict(kv, step)


class HostedRows(LayerKV):
    """Has entries in host memory."""

    def host_tensors(self):
        """A copy of what there is."""
        return [self.keys.clone()]


@fault("measured bytes are declared", "measured .* bytes in host memory, declared 0")
@dataclass(frozen=True)
class Hosted(Honest):
    """Says nothing of what it keeps on the host."""

    def layer(self, index):
        """A store of two tiers."""
        return HostedRows()


@fault("evicted entries are freed", "still allocated")
@dataclass(frozen=True)
class Secretive(Honest):
    """Keeps a view of the old entries where no ledger looks."""

    def evict(self, kv, step):
        """Stash an entry, and with it every other."""
        if step.moment.compresses:
            LEFT_BEHIND.append(kv.keys[:, :, :1])
        super().evict(kv, step)


@fault("evicted entries are freed", "still allocated")
@dataclass(frozen=True)
class Detached(Honest):
    """Keeps a tensor that shares the old entries' memory and nothing else with them."""

    def evict(self, kv, step):
        """Stash an entry without its history, and with it every other."""
        if step.moment.compresses:
            LEFT_BEHIND.append(kv.keys.data[:, :, :1].data)
        super().evict(kv, step)


@fault("decode copies nothing", "storages were replaced")
@dataclass(frozen=True)
class Copier(Honest):
    """Copies the cache in every step, as `torch.cat` would."""

    def evict(self, kv, step):
        """Keep everything, elsewhere."""
        super().evict(kv, step)
        if step.moment is Moment.DECODE:
            kv.keep(torch.arange(kv.n).expand(*kv.keys.shape[:2], -1))


@fault("chunks do not matter", "other entries were kept|logits differ")
@dataclass(frozen=True)
class EveryChunk(Honest):
    """Compresses after every chunk."""

    def evict(self, kv, step):
        """Whenever there is too much."""
        if step.moment.in_context and self.rows is not None and self.rows < kv.n:
            self.select(kv, self.score(kv, step), self.rows)


@fault("chunks do not matter", "other entries were kept|logits differ")
@dataclass(frozen=True)
class LastChunk(Honest):
    """Scores with the queries of the last chunk, however many those are."""

    def score(self, kv, step):
        """Attention of the mean query."""
        mean = step.query.mean(2, keepdim=True).unflatten(1, (kv.keys.shape[1], -1)).mean(2)
        return protect_last((mean @ kv.keys.mT)[:, :, 0], 4)


@fault("heads may be permuted", "other entries were kept|logits differ")
@dataclass(frozen=True)
class Numbered(Honest):
    """Says its heads are independent, and treats the first one differently."""

    def score(self, kv, step):
        """The first head likes small keys."""
        scores = kv.keys.norm(dim=-1)
        scores[:, 0] *= -1
        return protect_last(scores, 4)


@fault("heads may be permuted", "other heads|other entries")
@dataclass(frozen=True)
class Pooled(Honest):
    """Says its heads are independent, and scores entries by all of them."""

    def score(self, kv, step):
        """The mean over heads."""
        return protect_last(kv.keys.norm(dim=-1).mean(1, keepdim=True).expand(-1, kv.keys.shape[1], -1), 4)


@fault("batch does not matter", "logits differ")
@dataclass(frozen=True)
class Together(Honest):
    """Scores entries by the whole batch."""

    def score(self, kv, step):
        """The sum over sequences, as H2O's first code has it."""
        return protect_last(kv.keys.norm(dim=-1).sum(0, keepdim=True).expand(kv.keys.shape[0], -1, -1), 4)


@dataclass(frozen=True)
class Apart(ApartMethod):
    """Takes over documents that were run apart; without fault."""

    card: ClassVar[Card] = card("apart", budget=BudgetKind.NONE)


@fault("parts are reused", "nothing was taken over")
@dataclass(frozen=True)
class Whole(Apart):
    """Builds chunks and runs the whole prompt all the same."""

    def run(self, mixed):
        """Every token."""
        return mixed.run(mixed.places)


@fault("parts are reused", "same prompt from the same chunks")
@dataclass(frozen=True)
class WritesChunks(Apart):
    """Changes the entries of the chunks that it takes over."""

    def place(self, mixed):
        """Turn the values of the last document around."""
        super().place(mixed)
        for x in mixed.pieces[-1].chunk.values:
            x.neg_()


@fault("parts are reused", "built again")
@dataclass(frozen=True)
class Forgets(Apart):
    """Asks for chunks under a name that is new every time."""

    def owner(self, session):
        """Another owner for each session."""
        return replace(super().owner(session), template=str(id(session)))


@fault("parts are reused", "another model")
@dataclass(frozen=True)
class AnyModel(Apart):
    """Names chunks without their model."""

    def owner(self, session):
        """The same owner for all models."""
        return replace(super().owner(session), model="any")


@fault("turns continue", "counts other tokens")
@dataclass(frozen=True)
class CountsRows(Honest):
    """Takes the entries it stores for the tokens it has seen."""

    def evict(self, kv, step):
        """Evict, and forget."""
        super().evict(kv, step)
        kv.seen = kv.n


@fault("turns continue", "tokens seen")
@dataclass(frozen=True)
class RunsLastToken(Honest):
    """Runs the token that ends an answer as well, so the next question finds it twice."""

    def generate(self, session, max_new_tokens, stop):
        """One forward too many."""
        tokens = super().generate(session, max_new_tokens, stop)
        session.forward(torch.tensor([[x[-1]] for x in tokens.ids]), Moment.DECODE)
        return tokens


class SharedCounter(LayerKV):
    """Counts its steps in a tensor that forks share."""

    def append(self, step):
        """Count in place."""
        if self.n == 0:
            self.count = torch.zeros(())
        super().append(step)
        self.count += 1


@fault("forks equal fresh runs", "a fork differs|one differs|parent was changed")
@dataclass(frozen=True)
class SharesState(Honest):
    """Reads state that its forks wrote."""

    def layer(self, index):
        """A store that counts."""
        return SharedCounter()

    def attend(self, kv, step):
        """A little louder with every step."""
        return kv.attend(step) * (1 + kv.count / 1000)


class SharedRows(LayerKV):
    """Forks overwrite each other's entries."""

    def fork(self):
        """Share the block without saying so."""
        other = super().fork()
        self._buffer.leave(other)
        return other


@fault("forks equal fresh runs", "a fork differs|one differs|parent was changed")
@dataclass(frozen=True)
class SharesRows(Honest):
    """Two forks at a time write to the same entries."""

    def layer(self, index):
        """A store that shares too much."""
        return SharedRows()


@fault("forced tokens equal decode steps", "logits differ")
@dataclass(frozen=True)
class Forgetful(Honest):
    """Before every token that it decodes it forgets an entry, and its decode step is said to be a static one."""

    def attend(self, kv, step):
        """Drop the first entry stored."""
        if step.moment is Moment.DECODE:
            kv.keep(torch.arange(1, kv.n).expand(*kv.keys.shape[:2], -1))
        return super().attend(kv, step)


@fault("short contexts run", "entries|finite|did not act")
@dataclass(frozen=True)
class DividesByLittle(Honest):
    """Its attention is not finite where the context is shorter than its window."""

    def attend(self, kv, step):
        """Divide by the entries before the last four."""
        return kv.attend(step) / max(0, kv.n - 4) * (kv.n - 4)


@fault("state follows entries", "element per entry")
@dataclass(frozen=True)
class KeepsNumbers(Honest):
    """Keeps a number per entry where `keep` does not find it."""

    def attend(self, kv, step):
        """Write the numbers of all entries."""
        output = kv.attend(step)
        kv.state["numbers"] = kv.keys.norm(dim=-1)
        return output


@fault("short contexts run", "did not act")
@dataclass(frozen=True)
class LongOnly(Honest):
    """Acts on long contexts only, and does not say so."""

    def evict(self, kv, step):
        """From 100 tokens on."""
        if kv.n > 100:
            super().evict(kv, step)


@fault("runs are repeatable", "differs")
@dataclass(frozen=True)
class Leaks(Honest):
    """Remembers earlier samples."""

    def attend(self, kv, step):
        """A little louder with every sample."""
        if step.moment.compresses:
            LEFT_BEHIND.append(None)
        return kv.attend(step) * (1 + len(LEFT_BEHIND) / 1000)


@fault("runs are repeatable", "differs")
@dataclass(frozen=True)
class Unseeded(Honest):
    """Chooses by chance, and another way each time."""

    def score(self, kv, step):
        """Random numbers without a seed."""
        return protect_last(torch.rand(kv.keys.shape[:3]), 4)


@fault("static steps equal eager steps", "step 1")
@dataclass(frozen=True)
class CountsTheBlock(Honest):
    """Takes the block's size for the entries stored, which it is not once shapes are fixed."""

    def attend(self, kv, step):
        """Fainter as the block grows."""
        return kv.attend(step) / kv.keys.shape[2]


@fault("model is restored", "left changed")
@dataclass(frozen=True)
class Hooks(Honest):
    """Leaves a hook in the model."""

    def prefill(self, session, chunks):
        """Hook, then run."""
        LEFT_BEHIND.append(session.model.module.register_forward_hook(lambda *_: None))
        return super().prefill(session, chunks)


@fault("model is restored", "left changed")
@dataclass(frozen=True)
class Trains(Honest):
    """Changes a weight."""

    def prefill(self, session, chunks):
        """Nudge the head, then run."""
        weight = session.model.module.lm_head.weight
        with torch.no_grad():
            weight[0, 0] += 0.5
        LEFT_BEHIND.append(weight)
        return super().prefill(session, chunks)


@pytest.fixture
def clean():
    """Undo what faulty methods leave behind; the tiny models are shared by all tests."""
    tiny._make.cache_clear()
    yield
    LEFT_BEHIND.clear()
    tiny._make.cache_clear()


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("claim", "kind", "message"), fault.planted, ids=[f"{claim}-{kind.__name__}" for claim, kind, _ in fault.planted]
)
@pytest.mark.usefixtures("clean")
def test_planted_faults_are_caught(claim, kind, message):
    """The claim fails on a method with the fault that it is there for, and says what it saw."""
    with pytest.raises(AssertionError, match=message):
        INVARIANTS[claim](kind())


@pytest.mark.few(2)
@pytest.mark.parametrize(("claim", "kind", "message"), [
    x for x in fault.planted if ("logits differ" in x[2] or "step 1" in x[2]) and x[1] is not Louder
])
@pytest.mark.usefixtures("clean")
def test_planted_faults_are_caught_in_bfloat16(claim, kind, message):
    """The tolerance in bfloat16 is narrower than these faults; only an output 0.01 % too large is within it."""
    with tiny.placed("cpu", torch.bfloat16), pytest.raises(AssertionError, match=message):
        INVARIANTS[claim](kind())


def test_every_claim_has_a_planted_fault():
    """No claim is without a method that it catches."""
    assert {claim for claim, _, _ in fault.planted} == set(INVARIANTS)
    assert set(INVARIANTS) >= QUICK


@pytest.mark.slow
def test_an_honest_method_passes():
    """The method that all the faults were planted in has none itself."""
    assert [x.name for x in check(Honest) if not x.passed] == []


def test_a_tie_between_equal_tokens_is_no_fault():
    """A token occurs twice in the context, and rounding decides which of its keys is at the edge of the budget."""

    @dataclass(frozen=True)
    class SmallKeys(Honest):
        """Keeps the entries with the smallest keys and the last eight."""

        def score(self, kv, step):
            """The norm of the key, negative. [B, H_kv, n]"""
            return protect_last(-kv.keys.norm(dim=-1), 8)

    assert INVARIANTS["chunks do not matter"](SmallKeys())


@pytest.mark.parametrize(("error", "said"), [
    (ValueError("first line\nsecond line"), "ValueError: first line"), (AssertionError(), "an assertion failed"),
])
def test_exceptions_are_failed_claims(error, said):
    """A method that raises fails with the exception's first line and the place, and the other claims are tried."""

    @dataclass(frozen=True)
    class Raises(Honest):
        def score(self, kv, step):
            raise error

    claims = {x.name: x for x in check(Raises)}
    assert list(claims) == list(INVARIANTS)
    assert not claims["acts at its budget"].passed
    detail = claims["acts at its budget"].detail
    assert re.fullmatch(rf"{said} \(test_conformance.py, line \d+\)", detail)
    assert claims["first token is exact"].passed is False
    assert claims["settings are frozen"].passed


def test_methods_are_methods(method_name):
    """A name leads to a Method with a card of that name."""
    assert issubclass(find_method(method_name), Method)
    assert find_method(method_name).card.name == method_name
