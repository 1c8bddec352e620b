"""Methods that compute a part of the prompt's attention: what they count, and what they leave exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.check.footprint import acts_at_its_budget
from kvbench.cli.results import describe_prompt
from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, BudgetKind, Card
from kvbench.runs.results import EffectResult
from kvbench.store.prompt import MILLION, Chosen, PromptKV
from kvbench.techniques.sparse_prefill import SparsePrefillMethod, cover_mass, first_and_own

PROMPT = torch.randint(64, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@dataclass(frozen=True)
class Neighbors(SparsePrefillMethod):
    """The first block and the own one."""

    everything: bool = False

    card: ClassVar[Card] = Card(
        name="neighbors", title="", idea="", arxiv=None, year=None, family="test", stages=("generation",),
        budget=BudgetKind.PROMPT, heads="independent", upstream=None,
    )

    def choose(self, query, key, step):
        """The first block and the own one, or all."""
        del key, step
        count = -(-query.shape[2] // self.block_size)
        blocks = first_and_own(count, query).expand(*query.shape[:2], -1, -1)
        return Chosen(self.block_size, blocks | self.everything)


def open_session(model, **settings):
    """A session with blocks of 8 tokens."""
    return Session(model, Neighbors(block=8, **settings).fit(None, model.shape(len(PROMPT))))


def chosen_at_random():
    """Blocks of 4 for 2 sequences, 3 heads and 18 tokens, and columns."""
    generator = torch.Generator().manual_seed(0)
    blocks = (torch.rand(2, 3, 5, 5, generator=generator) < 0.4) | torch.eye(5, dtype=torch.bool)
    return Chosen(4, blocks, torch.rand(2, 3, 18, generator=generator) < 0.2)


def test_pairs_are_counted_once():
    """The count by blocks is that of all pairs that are visible, one by one."""
    chosen, at = chosen_at_random(), torch.arange(18)
    pairs = sum(int(chosen.visible(b, h, at, at).sum()) for b in range(2) for h in range(3))
    assert chosen.count(18) == pairs
    assert Chosen(4, chosen.blocks).count(18) < pairs


def test_lost_mass_is_that_of_dense_attention(make_step):
    """Of all queries of a short prompt, against the whole attention matrix."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 3, 18, 8, generator=generator), torch.randn(2, 1, 18, 8, generator=generator)
    kv, step, chosen = PromptKV(), make_step(query, key, scale=0.5), chosen_at_random()
    kv.append(step)
    kv.note(step, chosen)
    hidden = torch.ones(18, 18, dtype=torch.bool).triu(1)
    mass = (query @ key.mT * 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    at = torch.arange(18)
    lost = torch.stack([
        torch.stack([(mass[b, h] * ~chosen.visible(b, h, at, at)).sum(1) for h in range(3)]) for b in range(2)
    ])
    facts = kv.facts()
    assert facts["sampled_queries"].value == 2 * 3 * 18
    assert facts["lost_mass_millionths"].value == pytest.approx(float(lost.sum()) * MILLION, abs=10)
    assert facts["worst_lost_mass_millionths"].value == pytest.approx(float(lost.max()) * MILLION, abs=2)
    assert facts["prompt_pairs_computed"].value + facts["prompt_pairs_skipped"].value == 2 * 3 * 18 * 19 // 2


def test_counting_waits_for_no_device(make_step):
    """No number is read from a tensor before the facts are, so that a prefill is not timed with it."""
    query, key = torch.randn(2, 6, 18, 8), torch.randn(2, 2, 18, 8)
    step, chosen = make_step(query, key, scale=0.5), chosen_at_random()
    chosen = Chosen(4, *(x.repeat_interleave(2, dim=1) for x in (chosen.blocks, chosen.columns)))
    kv = PromptKV()
    kv.append(step)
    with NoNumbers():
        kv.note(step, chosen)
        kv.note(step, chosen)
    once = PromptKV()
    once.append(step)
    once.note(step, chosen)
    found, wanted = ({name: x.value for name, x in store.facts().items()} for store in (kv, once))
    worst = "worst_lost_mass_millionths"
    assert found == {name: x if name == worst else 2 * x for name, x in wanted.items()}


class NoNumbers(TorchDispatchMode):
    """Refuses to read a number from a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read"
        return func(*args, **(kwargs or {}))


def test_a_session_counts_the_prompt_and_reads_all_later():
    """30 tokens in blocks of 8: 3 * 36 + 21 pairs of own blocks, 22 queries of 8 entries; two layers of 4 heads."""
    model = tiny_model()
    with open_session(model) as session:
        session.prefill(PROMPT)
        facts = dict(session.effect().facts)
        session.ask([1, 2, 3], 4)
        assert session.effect().facts == facts
        assert session.memory().read_bytes_per_step == sum(x.nbytes() - x.spare_bytes() for x in session.layers)
    assert facts["prompt_pairs_computed"] == 2 * 4 * (3 * 36 + 21 + 22 * 8)
    assert facts["prompt_pairs_skipped"] == 2 * 4 * (30 * 31 // 2) - facts["prompt_pairs_computed"]


def test_all_blocks_are_the_full_cache():
    """With every block chosen, logits are the full cache's; with two blocks per row they are not."""
    model = tiny_model()
    with Session(model, FullCache()) as full:
        wanted = full.prefill(PROMPT)
    for everything in (True, False):
        with open_session(model, everything=everything) as session:
            assert torch.allclose(session.prefill(PROMPT), wanted, atol=1e-4) is everything


def test_a_method_that_skips_nothing_fails_the_check():
    """Planted fault: every block is computed."""
    assert acts_at_its_budget(Neighbors())
    with pytest.raises(AssertionError, match="no effect"):
        acts_at_its_budget(Neighbors(everything=True))


def test_chunks_run_as_one_pass():
    """The last queries decide for the first ones, so a session's chunks do not cut the prompt."""
    model = tiny_model()
    method = Neighbors(block=8).fit(None, model.shape(30))
    with open_session(model) as whole, Session(model, method, chunk=7) as parts:
        assert torch.equal(whole.prefill(PROMPT), parts.prefill(PROMPT))
        assert parts.effect().facts == whole.effect().facts


def test_budgets_and_sliding_models_are_refused():
    """With the reason."""
    with pytest.raises(UserError, match="takes no budget, got 25%"):
        Neighbors().fit(Budget.parse("25%"), tiny_model().shape(30))
    with pytest.raises(UserError, match="this model has no others"):
        Neighbors().fit(None, tiny_model(window=8).shape(30))


def test_a_model_with_some_sliding_layers_is_taken():
    """Its other layers have a part of the prompt's attention to leave out."""
    shape = tiny_model().shape(30)
    first, *others = shape.layers
    mixed = replace(shape, layers=(replace(first, window=8), *others))
    assert Neighbors().fit(None, mixed) == Neighbors().fit(None, shape)


def test_numbers_of_tokens_shrink_with_the_context():
    """To as large a part of it as of the published length; at least to one, and never above the published number."""
    method = Neighbors().fit(None, tiny_model().shape(30))
    assert [method.scaled(x, 300) for x in (50, 1)] == [5, 1]
    assert method.scaled(50, 10) == 50


@pytest.mark.parametrize(("length", "block"), [(1, 1), (63, 1), (120, 2), (2048, 64), (4096, 128), (8192, 128)])
def test_blocks_of_short_contexts_are_small(length, block):
    """A power of two near a 32nd of the context, and at most the published size."""
    assert Neighbors().fit(None, tiny_model().shape(length)).block_size == block


def test_the_fewest_blocks_cover_the_mass():
    """Marked ones first, then the largest, until the share is reached; everything at 1."""
    mass = torch.tensor([0.05, 0.5, 0.0, 0.3, 0.15])
    always = torch.tensor([True, False, False, False, False])
    assert cover_mass(mass, 0.5, always).tolist() == [True, True, False, False, False]
    assert cover_mass(mass, 0.6, always).tolist() == [True, True, False, True, False]
    assert cover_mass(mass, 1.0, always).all()


def test_every_row_covers_a_share_of_its_own_mass():
    """6 of 10, and 60 of 100 with a marked block of no mass."""
    mass = torch.tensor([[1.0, 5, 0, 3, 1], [40, 0, 30, 10, 20]])
    found = cover_mass(mass, 0.6, torch.eye(5, dtype=torch.bool)[:2])
    assert found.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]


def test_a_run_prints_the_share_of_attention_that_was_computed():
    """One quarter of the pairs, and lost mass as a share."""
    facts = {
        "prompt_pairs_computed": 250, "prompt_pairs_skipped": 750, "sampled_queries": 10,
        "lost_mass_millionths": 300_000, "worst_lost_mass_millionths": 125_000,
    }
    effect = EffectResult(
        kind="prompt", n_acted=1, n=1, n_identity=0, entries_seen=1, entries_kept=1, entries_kept_by_layer=(1,),
        facts=facts,
    )
    mass = "a sample of queries lost 3.00% of their mass on average, 12.5% at most"
    assert describe_prompt(effect) == [("prompt", f"25.0% of its attention computed; {mass}")]
    assert describe_prompt(effect.model_copy(update={"facts": {}})) == []


@pytest.mark.parametrize(("window", "pairs"), [(None, 4 * 30 * 31 // 2), (16, 0)])
def test_a_sliding_window_layer_stays_exact(make_step, window, pairs):
    """And counts no pairs, in a model that also has layers with full attention."""
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(1, 4, 30, 8, generator=generator), torch.randn(1, 2, 30, 8, generator=generator)
    kv, step = PromptKV(), make_step(query, key, window=window)
    kv.append(step)
    found = replace(Neighbors(), block_size=8).attend(kv, step)
    assert torch.equal(found, kv.attend(step)) is (window is not None)
    assert kv.pairs == pairs
