"""The decoding loop: schedule, order, noise and thresholds, against a sampler written out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.diffusion import policy as diffusion
from kvbench.diffusion.policy import Denoising, PassPlan, denoise, indices_of, top
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.hf.adapter import attached
from kvbench.method import BudgetKind, Card
from kvbench.methods.diffusion.dkv_cache import DkvCacheDecode, DkvCacheGreedy
from kvbench.methods.diffusion.none import NoCache

MASK = 63  # of the models in conftest.py


def by_hand(model, prompt, answer, steps, block):
    """LLaDA's sampler with low-confidence remasking, one sequence, with the model's own attention and no mask."""
    ids = torch.cat([prompt, torch.full((answer,), MASK)])
    n, shift = len(ids), int(model.masking.shifted)
    model.module.set_attn_implementation("eager")
    for start in range(len(prompt), n, block):
        per_block = steps // (answer // block)
        for step in range(per_block):
            with torch.no_grad():
                logits = model.module(input_ids=ids[None], attention_mask=torch.zeros(1, 1, n, n)).logits[0]
            logits = torch.cat([logits[:1], logits[:-1]]) if shift else logits
            logits[:, MASK] = -torch.inf
            masked = [i for i in range(start, start + block) if ids[i] == MASK]
            count = block // per_block + (step < block % per_block)
            sure = {i: logits[i].softmax(-1).max().item() for i in masked}
            for i in sorted(masked, key=lambda i: -sure[i])[:count]:
                ids[i] = logits[i].argmax()
    return ids[len(prompt) :].tolist()


@pytest.mark.few(6)
@pytest.mark.parametrize(("steps", "block"), [(16, 16), (16, 4), (8, 8), (5, 16), (6, 8)])
def test_the_loop_is_lladas_sampler(model, prompts, fill, steps, block):
    """Token for token, in blocks and with fewer steps than tokens, for both kinds of heads."""
    found = fill(model, NoCache(), steps=steps, block=block)
    assert found.ids == [by_hand(model, prompt, 16, steps, block) for prompt in prompts]
    assert found.nfe == steps
    assert found.computed_tokens == found.sequence_length == 36
    assert found.peak_bytes == 0


@dataclass(frozen=True)
class Watching(NoCache):
    """No cache, and a look at what is committed."""

    seen: ClassVar[list[torch.Tensor]] = []
    card: ClassVar[Card] = NoCache.card.model_copy(update={"name": "watching"})

    def begin(self, d: Denoising) -> None:
        """The first block starts anew."""
        if d.start == d.prompt:
            self.seen.clear()

    def commit(self, d: Denoising, accepted: torch.Tensor) -> None:
        """Ids after every step."""
        assert not bool((d.ids[accepted] == MASK).any())
        self.seen.append(d.ids.clone())


@pytest.mark.parametrize("how", [
    {}, {"block": 4}, {"steps": 5}, {"remasking": "random", "block": 8}, {"threshold": 0.2}, {"temperature": 1.0},
])
def test_every_token_is_committed_once_and_never_changes(model, fill, how):
    """Under every schedule: masks go, tokens stay, blocks are finished one after the other."""
    found = fill(model, Watching(), **how)
    before = torch.full((2, 16), MASK)
    block = how.get("block", 16)
    for ids in (x[:, 20:] for x in Watching.seen):
        kept = before != MASK
        assert torch.equal(ids[kept], before[kept])
        assert bool(((ids != MASK) & ~kept).any())
        for start in range(block, 16, block):
            assert not bool((ids[:, start:] != MASK).any()) or not bool((ids[:, :start] == MASK).any())
        before = ids
    assert found.ids == before.tolist()
    assert MASK not in {x for row in found.ids for x in row}


def test_one_token_per_step_where_steps_are_tokens(model, fill):
    """n_i is 1 at every step, and the commits add up to the answer."""
    fill(model, Watching())
    counts = [int((ids[0, 20:] != MASK).sum()) for ids in Watching.seen]
    assert counts == list(range(1, 17))


@pytest.mark.few(2)
@pytest.mark.parametrize("how", [{}, {"remasking": "random"}, {"temperature": 0.7}, {"threshold": 0.3}])
def test_the_same_seed_is_the_same_answer(model, fill, how):
    """Determinism; another seed changes what is drawn at random, and nothing else."""
    assert fill(model, NoCache(), **how).ids == fill(model, NoCache(), **how).ids
    drawn = "remasking" in how or "temperature" in how
    assert (fill(model, NoCache(), seed=1, **how).ids != fill(model, NoCache(), **how).ids) == drawn


@pytest.mark.few
@pytest.mark.parametrize("how", [{}, {"block": 4}, {"threshold": 0.2}])
def test_a_sequence_does_not_depend_on_its_batch(model, prompts, fill, how):
    """Batch invariance, also where thresholds finish sequences after unequal numbers of steps."""
    both = fill(model, NoCache(), **how).ids
    assert both == [fill(model, NoCache(), prompt=prompt[None], **how).ids[0] for prompt in prompts]


def test_a_threshold_above_all_probabilities_is_one_token_per_pass(model, fill):
    """And one of 0 commits a block per pass."""
    one = fill(model, NoCache(), threshold=1.0, prompt=torch.arange(20)[None])
    assert one.ids == fill(model, NoCache(), prompt=torch.arange(20)[None]).ids
    assert one.nfe == 16
    assert fill(model, NoCache(), threshold=0.0, block=4).nfe == 4


def test_random_remasking_reveals_in_one_order_whatever_the_steps(model, fill):
    """The order is drawn for a block, not for a step."""
    orders = []
    for steps in (16, 4):
        fill(model, Watching(), steps=steps, remasking="random")
        shown = [frozenset((ids[0] != MASK).nonzero().flatten().tolist()) for ids in Watching.seen]
        orders.append(shown)
    assert set(orders[1]) <= set(orders[0])


def test_blocks_are_revealed_in_the_same_order_whatever_a_policy_computes(unshifted, prompts):
    """Also with noise: it is drawn apart, and rows that are left out move nothing."""
    sampling = Sampling(steps=16, block=8, remasking="random", temperature=0.8)
    orders = []
    for method in (NoCache(), DkvCacheGreedy(window=0), DkvCacheDecode()):
        d = Denoising(unshifted, method, prompts, 16, sampling)
        with attached(unshifted.module), torch.no_grad():
            for start in (20, 28):
                d._begin(start)
                for _ in range(8):
                    d._advance()
                orders.append(d.order)
    first, second = orders[::2], orders[1::2]
    assert all(torch.equal(x, first[0]) for x in first)
    assert all(torch.equal(x, second[0]) for x in second)
    assert not torch.equal(first[0], second[0])


def test_noise_belongs_to_a_pass_and_a_place(unshifted, prompts):
    """A place computed alone is given the token that it is given among others; the next pass gives it another."""
    d = Denoising(unshifted, NoCache(), prompts[:1], 16, Sampling(steps=16, block=16, temperature=50.0))
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).expand(16, -1)
    places = torch.arange(20, 36)
    sequence = torch.zeros_like(places)
    among, _ = d._sample(hidden, sequence, places)
    alone = [d._sample(hidden[:1], sequence[:1], place[None])[0] for place in places]
    assert torch.equal(torch.cat(alone), among)
    d.steps_done += 1
    assert not torch.equal(d._sample(hidden, sequence, places)[0], among)


@pytest.mark.few
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_sampled_tokens_have_the_probabilities_of_the_softmax(unshifted, temperature):
    """Of 20,000 one-token answers to one prompt, each token's share is softmax(logits / T) within five deviations."""
    n, prompt = 20_000, torch.tensor([[5]])
    unshifted.module.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor([[5, MASK]])
        logits = unshifted.module(input_ids=ids, attention_mask=torch.zeros(1, 1, 2, 2)).logits[0, 1]
    logits[MASK] = -torch.inf
    wanted = (logits / temperature).softmax(-1)
    sampling = Sampling(steps=1, block=1, temperature=temperature)
    ids = denoise(unshifted, NoCache(), prompt.expand(n, -1), 1, sampling).ids
    found = torch.tensor(ids).flatten().bincount(minlength=64) / n
    assert float(wanted.max()) < 0.9  # there is something to draw
    assert bool(((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / n).sqrt() + 1 / n).all())


def test_the_head_may_run_in_parts(model, fill, monkeypatch):
    """A few rows' logits at a time are all rows' logits."""
    whole = fill(model, NoCache(), threshold=0.2)
    monkeypatch.setattr(diffusion, "HEAD_TOKENS", 3)
    assert fill(model, NoCache(), threshold=0.2) == whole


def test_some_tokens_begin_no_answer(model, prompts):
    """They may stand behind the first place."""
    sampling = Sampling(steps=16, block=16)
    free = denoise(model, NoCache(), prompts[0], 16, sampling).ids[0]
    bound = denoise(model, NoCache(), prompts[0], 16, sampling, never_first=free).ids[0]
    assert bound[0] not in free
    assert set(bound[1:]) & set(free)


def test_the_prompt_may_hold_the_mask(model, fill):
    """A mask token that a user typed is text."""
    prompt = torch.arange(20)[None].clone()
    prompt[0, 5] = MASK
    found = fill(model, Watching(), prompt=prompt)
    assert Watching.seen[-1][0, 5] == MASK
    assert MASK not in found.ids[0]


@dataclass(frozen=True)
class Overflowing(NoCache):
    """Hidden states beyond the range of the model's type."""

    card: ClassVar[Card] = NoCache.card.model_copy(update={"name": "overflowing"})

    def run(self, d, plan, index):
        """No numbers."""
        return super().run(d, plan, index) * torch.nan


@pytest.mark.parametrize("how", [{}, {"remasking": "random"}, {"threshold": 0.5}, {"temperature": 1.0}])
def test_logits_that_are_no_numbers_are_refused_and_never_committed(model, fill, how):
    """Under every rule of acceptance; the order of random reveals would commit them."""
    with pytest.raises(UserError, match=r"not numbers \(NaN\) in float32: method overflowing makes them so"):
        fill(model, Overflowing(), **how)


def test_a_policy_that_computes_nothing_needed_is_stopped(model, fill):
    """A loop without an end is an error of the policy."""

    @dataclass(frozen=True)
    class Blind(NoCache):
        card: ClassVar[Card] = NoCache.card.model_copy(update={"name": "blind", "budget": BudgetKind.NONE})

        def plan(self, d):
            return PassPlan() if d.nfe == 0 else PassPlan(compute=(d.positions < 3).expand_as(d.ids))

    with pytest.raises(RuntimeError, match="blind computed no token that could be committed at step 1"):
        fill(model, Blind())


@pytest.mark.parametrize(("how", "message"), [
    ({"block": 5}, r"block=5 does not divide a response block of 16 tokens. Use one of \[1, 2, 4, 8, 16\], or .*=20"),
    ({"block": 4, "steps": 3}, "steps=3 is less than one step for each of 4 blocks"),
    ({"threshold": 0.9, "remasking": "random"}, "threshold needs confidences"),
])
def test_what_does_not_fit_is_refused(how, message):
    """With the value and what would."""
    with pytest.raises(UserError, match=message):
        Sampling(**{"steps": 16, "block": 16, **how}).check(16)


SCORES = st.lists(st.sampled_from([0.1, 0.2, 0.3, -float("inf")]), min_size=6, max_size=6)


@given(st.lists(SCORES, min_size=2, max_size=2), st.lists(st.integers(0, 7), min_size=2, max_size=2))
def test_top_takes_the_greatest_and_never_more_than_there_are(scores, counts):
    """Ties go to the first; -inf is never taken."""
    taken = top(torch.tensor(scores), torch.tensor(counts))
    for row, n, found in zip(scores, counts, taken.tolist(), strict=True):
        finite = [i for i, x in enumerate(row) if x > -float("inf")]
        wanted = sorted(finite, key=lambda i: (-row[i], i))[:n]
        assert [i for i, x in enumerate(found) if x] == sorted(wanted)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3).filter(
    lambda rows: all(any(row) for row in rows)
))
def test_positions_repeat_the_first_where_rows_are_short(rows):
    """As many in every sequence, each place that is set among them."""
    found = indices_of(torch.tensor(rows)).tolist()
    for row, places in zip(rows, found, strict=True):
        wanted = [i for i, x in enumerate(row) if x]
        assert places == wanted + [wanted[0]] * (len(places) - len(wanted))
