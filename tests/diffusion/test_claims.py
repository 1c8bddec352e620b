"""`kvbench check` on policies: every registered one keeps the claims, and each claim catches one that does not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from kvbench.check import POLICY_INVARIANTS, NotApplicableError, check
from kvbench.diffusion.policy import PassPlan, Policy
from kvbench.hf.tiny import tiny_diffusion
from kvbench.methods.diffusion.none import NoCache
from kvbench.registry import find_method, list_entries
from kvbench.store.positions import PositionKV

from .toys import CARD, Thoughtless

GUIDE = Path(__file__).parents[2] / "docs" / "diffusion.md"
POLICIES = [x.name for x in list_entries("method") if x.models == "diffusion"]
EXACT = [
    ("dkv-cache-decode", {"refresh": 1}), ("dkv-cache-greedy", {"refresh": 1}), ("window-diffusion", {"refresh": 1}),
    ("dllm-cache", {"prompt": 1, "answer": 1}),
]


QUICK = {"settings are frozen", "identity equals no cache"}
"""Claims that `make test` tries on every policy; the others take longer. The golden outputs, of which it checks all,
show that every policy acts."""
ACTING = {"dkv-cache-decode", "fast-dllm-dual", "window-diffusion"}
"""Policies on which it tries this claim, too."""


@pytest.mark.parametrize(("name", "claim"), [
    pytest.param(name, x, marks=() if x in QUICK or (x == "acts" and name in ACTING) else pytest.mark.slow)
    for name in POLICIES for x in POLICY_INVARIANTS
])
def test_every_policy_keeps_every_claim(name, claim):
    """At its defaults, or the claim does not apply and says why."""
    try:
        assert POLICY_INVARIANTS[claim](find_method(name)())
    except NotApplicableError as reason:
        assert str(reason)  # noqa: PT017  # a reason is what is asked for


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), EXACT, ids=[x for x, _ in EXACT])
def test_declared_identities_are_identities(name, settings):
    """The claim applies, and holds."""
    assert POLICY_INVARIANTS["identity equals no cache"](find_method(name)(**settings)).startswith("equal tokens in")


@dataclass(frozen=True)
class Lagging(Policy):
    """A cache that works: all rows but those before the answer, from the second pass on."""

    card: ClassVar = CARD

    def plan(self, d):
        answer = (d.positions >= d.prompt).expand_as(d.ids)
        return PassPlan() if d.nfe == 0 else PassPlan(compute=answer | d.predictors(answer))


class Forgetful(Lagging):
    """Computes the masks and not what predicts them."""

    def plan(self, d):
        return PassPlan() if d.nfe == 0 else PassPlan(compute=d.masked)


class Correcting(Lagging):
    """Writes over a token that stood."""

    def commit(self, d, accepted):
        d.ids[:, d.prompt] = 7


class Eager(Lagging):
    """Commits what has no candidate."""

    def accept(self, d, confidence):
        return super().accept(d, confidence) | d.masked


class Boasting(Lagging):
    """Declared to lose nothing."""

    def identity(self, shape):
        return True


@dataclass
class Deep(PositionKV):
    """More than it counts."""

    def nbytes(self):
        return super().nbytes() // 2


class Hoarding(Lagging):
    """Rows in a store that counts half of them."""

    def store(self, length):
        return Deep(length)


class Sharing(Lagging):
    """Sequences of a batch see one another."""

    def run(self, d, plan, rows):
        hidden = super().run(d, plan, rows)
        return hidden + hidden.flip(0)


class Restless(Lagging):
    """Draws from a generator that is not the run's."""

    def run(self, d, plan, rows):
        hidden = super().run(d, plan, rows)
        return hidden + torch.randn_like(hidden)


class Marking(Lagging):
    """Leaves something on the model."""

    def begin(self, d):
        d.model.module.lm_head.register_forward_hook(lambda *_: None)


FAULTS = {
    Forgetful: "committed tokens are computed", Correcting: "answers are complete", Eager: "answers are complete",
    Boasting: "identity equals no cache", Thoughtless: "acts", Hoarding: "bytes are counted",
    Sharing: "batch does not matter", Restless: "runs are repeatable", Marking: "runs are repeatable",
}


@pytest.mark.slow
def test_a_policy_that_works_keeps_them():
    """The policy in which the tests below plant faults passes every check."""
    assert [x.name for x in check(Lagging) if not x.passed] == []


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "claim"), FAULTS.items(), ids=[x.__name__ for x in FAULTS])
def test_a_fault_is_caught(kind, claim):
    """By the claim that is for it."""
    with pytest.raises(AssertionError):
        POLICY_INVARIANTS[claim](kind())
    for shifted in (False, True):
        tiny_diffusion(shifted=shifted).module.lm_head._forward_hooks.clear()


def test_no_cache_needs_no_proof():
    """Its identity is tried; that it acts is not asked of it."""
    assert POLICY_INVARIANTS["identity equals no cache"](NoCache()) == "equal tokens in 10 runs"
    with pytest.raises(NotApplicableError, match="its settings are declared lossless"):
        POLICY_INVARIANTS["acts"](NoCache())


@pytest.mark.slow
def test_the_policy_shown_keeps_every_claim(tmp_path):
    """The file in docs/diffusion.md."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "rare_prompt.py"
    path.write_text(code, encoding="utf-8")
    assert [(x.name, x.detail) for x in check(find_method(str(path))) if not x.passed] == []


def test_claims_are_tried_from_the_command_line(kvbench):
    """Exit code 0 where all hold, 1 where one does not."""
    held = kvbench("check", "local-leap", "--json")
    assert (held.code, [x["passed"] for x in held.json]) == (0, [True] * 9)
    broken = kvbench("check", "local-leap", "--set", "relaxed=0.9", "--json")
    assert broken.code == 1
    assert [x["name"] for x in broken.json if not x["passed"]] == ["acts"]
