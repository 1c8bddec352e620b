"""LaViDa, Fast-dDrive and WeDLM: entries that are exact, because masks keep later tokens out of earlier ones."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from kvbench.diffusion.policy import Denoising, denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.hf.adapter import attached
from kvbench.hf.masked import Masking, read_masking
from kvbench.methods.diffusion.fast_ddrive import FREE, FastDdrive
from kvbench.methods.diffusion.fast_dllm import FastDllmDual
from kvbench.methods.diffusion.lavida import Lavida, reveal_counts
from kvbench.methods.diffusion.none import NoCache
from kvbench.methods.diffusion.wedlm import WeDlm
from kvbench.settings import configure
from kvbench.task import Mode, Split, encode
from kvbench.tasks.growth.lists import ListCopy

from .by_card import Writing, sections, wedlm
from .conftest import MASK, WORDS, make_module

SCHEDULES = [
    {}, {"block": 4}, {"steps": 6}, {"threshold": 0.2}, {"temperature": 0.8}, {"remasking": "random", "steps": 8},
]
kinds = pytest.mark.parametrize("shifted", [False, True], ids=["llada", "dream"])


@pytest.fixture(scope="module")
def deep():
    """Four layers."""
    return make_module(layers=4)


@pytest.fixture(params=range(2))
def text(request):
    """A prompt of 20 tokens."""
    return torch.randint(WORDS, (20,), generator=torch.Generator().manual_seed(request.param))


def follow(model, method, prompt, **how):
    """The state after an answer of 16 tokens, and the entries that were final after every step."""
    seen = []

    class Watched(type(method)):
        def commit(self, d, accepted):
            super().commit(d, accepted)
            seen.append([(kv.final, kv.keys.clone(), kv.values.clone()) for kv in d.stores])

    watched = object.__new__(Watched)
    watched.__dict__.update(method.__dict__)
    d = Denoising(model, watched, prompt, 16, Sampling(**{"steps": 16, "block": 16, **how}))
    d.denoise()
    return d, seen


# LaViDa


@pytest.mark.few(4)
@kinds
@pytest.mark.parametrize("how", SCHEDULES)
def test_lavida_is_exact_on_a_model_of_the_prefix_mask(deep, prompts, fill, shifted, how):
    """Token for token what no cache gives under the mask, with the prompt computed once."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted, attention="prefix"))
    plain, ours = (fill(model, x, **how) for x in (NoCache(), Lavida()))
    assert ours.ids == plain.ids
    assert ours.nfe == plain.nfe + 1
    assert ours.computed_tokens * ours.nfe == pytest.approx(20 - shifted + plain.nfe * (16 + shifted))


@kinds
def test_lavida_writes_what_its_card_writes(deep, text, fill, shifted):
    """Also on a model of full attention, where it is another model's answer."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    found = fill(model, Lavida(), prompt=text[None]).ids[0]
    with torch.no_grad():
        assert found == sections(Writing(deep, text, 16, shifted), 16, whole=True)[0]
    assert found != fill(model, NoCache(), prompt=text[None]).ids[0]


@kinds
def test_no_cache_applies_the_prefix_mask(deep, text, fill, shifted):
    """On a model whose config.json says so; the answer by hand."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted, attention="prefix"))
    with torch.no_grad():
        by_hand = sections(Writing(deep, text, 16, shifted), 16, whole=True)[0]
    assert fill(model, NoCache(), prompt=text[None]).ids[0] == by_hand


def test_other_policies_are_refused_under_the_prefix_mask(deep, text, fill):
    """They compute prompts that read the answer."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted=False, attention="prefix"))
    with pytest.raises(UserError, match=r"fast-dllm-dual computes prompts that attend.*`none` or `lavida`"):
        fill(model, FastDllmDual(), prompt=text[None])


def draw_lists(n):
    """Prompts of lists to copy with their answers, new to the bundled models. ids, length of the prompt"""
    tokenizer = load_model("mini-diffusion").tokenizer
    for x in ListCopy().examples(
        seed=5, split=Split.DEV, n=n, length=256, turns=1, mode=Mode.SINGLE, tokenizer=tokenizer
    ):
        asked = encode(ListCopy(), x, tokenizer)
        prompt = [*asked.context, *asked.turns[0].first]
        yield torch.tensor([[*prompt, *asked.turns[0].answer]]), len(prompt)


def test_lavida_is_exact_on_the_bundled_model_of_the_prefix_mask():
    """In float32, token for token, with the prompt computed once."""
    model = load_model("mini-diffusion-prefix", dtype="float32")
    [(ids, prompt)] = draw_lists(1)
    plain, ours = (denoise(model, x, ids[:, :prompt], 32, Sampling(steps=8, block=32)) for x in (NoCache(), Lavida()))
    assert ours.ids == plain.ids
    assert ours.nfe == plain.nfe + 1
    assert ours.computed_tokens * ours.nfe == pytest.approx(prompt + plain.nfe * 32)


@pytest.mark.slow
def test_tuning_undid_half_of_the_harm_of_the_prefix_mask():
    """Mean loss of masked tokens of lists: before the tuning, under the mask and without; after it, under the mask."""
    losses = {"full": [], "before": [], "tuned": []}
    models = {name: load_model(name, dtype="float32").module for name in ("mini-diffusion", "mini-diffusion-prefix")}
    drawn = torch.Generator().manual_seed(0)
    for ids, prompt in draw_lists(8):
        answer = torch.arange(ids.shape[1]) >= prompt
        for share in (0.3, 0.6, 0.9):
            hidden = answer & (torch.rand(ids.shape[1], generator=drawn) < share)
            for how, name in zip(losses, ("mini-diffusion", "mini-diffusion", "mini-diffusion-prefix"), strict=True):
                seen = torch.ones(len(answer), len(answer), dtype=torch.bool)
                if how != "full":
                    seen = answer[:, None] | ~answer
                with torch.no_grad():
                    logits = models[name](
                        input_ids=ids.masked_fill(hidden, 4096), attention_mask=seen[None, None], use_cache=False
                    ).logits
                losses[how].append(float(cross_entropy(logits[0, hidden], ids[0, hidden])))
    full, before, tuned = (fmean(x) for x in losses.values())
    assert full < tuned < (full + before) / 2


def test_the_mask_stands_in_config_json():
    """Full unless it says prefix."""
    own = {"mask_token_id": 3, "shifted_head": False}

    def read(**more):
        return read_masking({"vocab_size": 9, "diffusion": {**own, **more}})

    assert [read().attention, read(attention="prefix").attention] == ["full", "prefix"]
    with pytest.raises(UserError, match="attention 'causal' of a diffusion model: it must be full or prefix"):
        read(attention="causal")
    del own["shifted_head"]  # a wrong head gives wrong tokens, which no check at load can notice
    with pytest.raises(UserError, match="shifted_head None: it must be true or false"):
        read()


def test_the_prompts_entries_do_not_depend_on_the_answer(unshifted, prompts):
    """They are those of the prompt alone, after every step."""
    d, _ = follow(unshifted, Lavida(), prompts[:1])
    alone, _ = follow(unshifted, Lavida(), prompts[:1], steps=2)
    for kv, other in zip(d.stores, alone.stores, strict=True):
        assert kv.prefix[0].equal(other.prefix[0]) and kv.prefix[1].equal(other.prefix[1])
        assert kv.prefix[0].shape[2] == 20


@given(st.integers(1, 200), st.integers(1, 200), st.floats(0.01, 9.0))
def test_a_shifted_schedule_commits_every_token(tokens, steps, factor):
    """Sums, lengths, and no step without a token."""
    counts = reveal_counts(tokens, steps, factor)
    assert sum(counts) == tokens
    assert len(counts) == min(tokens, steps)
    assert min(counts) >= 1


def test_a_shifted_schedule_by_hand():
    """3t / (1 + 2t) of 10 tokens in 4 steps reaches 5, 7, 9, 10: from the back 1, 2, 2, 5."""
    assert reveal_counts(10, 4, 3) == [1, 2, 2, 5]
    assert reveal_counts(8, 4, 1) == [2, 2, 2, 2]


def test_a_factor_below_one_commits_many_tokens_first():
    """64 tokens in 32 steps, as in the authors' evaluation, and as their function does without a factor."""
    first = [6, 5, 5, 4, 4, 3, 3, 3, 2, 3, 2, 2, 2, 1, 2, *[1] * 17]
    last = [*[1] * 13, 2, 1, 1, 2, 2, 1, 2, 2, 3, 2, 2, 3, 3, 4, 3, 4, 5, 5, 4]
    assert Lavida().factor == 0.33
    assert str(configure(Lavida, {"factor": "3"}, "setting", "lavida").factor) == "3"  # as in the specs of earlier runs
    assert reveal_counts(64, 32, 0.33) == first
    assert reveal_counts(64, 32, 3) == last


def test_a_threshold_decides_whatever_the_schedule(unshifted, prompts, fill):
    """The tokens and passes of the run's own schedule."""
    linear, shift = (fill(unshifted, Lavida(schedule=x), prompt=prompts, threshold=0.2) for x in ("linear", "shift"))
    assert (shift.ids, shift.nfe) == (linear.ids, linear.nfe)
    assert shift.nfe != fill(unshifted, Lavida(schedule="shift"), prompt=prompts).nfe


def test_a_run_follows_the_shifted_schedule(unshifted, prompts):
    """Tokens by step: 3t / (1 + 2t) of 16 reaches 8, 12, 14, 16; 0.33t / (1 - 0.67t) reaches 1, 3, 7, 16."""
    counts = []

    class Watched(Lavida):
        def commit(self, d, accepted):
            super().commit(d, accepted)
            counts.append(int(accepted.sum()))

    for settings in ({"factor": 3}, {}):
        Denoising(unshifted, Watched(schedule="shift", **settings), prompts[:1], 16, Sampling(4, 16)).denoise()
    assert counts == [2, 2, 4, 8, 9, 4, 2, 1]


# Fast-dDrive


@pytest.mark.few(4)
@kinds
@pytest.mark.parametrize("block", [4, 8])
def test_sections_are_what_their_card_writes(deep, text, fill, shifted, block):
    """Tokens, and the entries of finished sections: those of a pass over the final text under the mask."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    d, _ = follow(model, FastDdrive(), text[None], block=block)
    with torch.no_grad():
        written, passed = sections(Writing(deep, text, 16, shifted), block, whole=False)
    assert d.ids[0, 20:].tolist() == written
    final = d.stores[0].final - (20 - shifted)
    assert final == 16 - block
    for kv, (_, keys, values) in zip(d.stores, passed, strict=True):
        assert torch.allclose(kv.prefix[0][0], keys[:, : 20 - shifted], atol=1e-5)
        assert torch.allclose(kv.keys[0, :, :final], keys[:, 20 - shifted :][:, :final], atol=1e-5)
        assert torch.allclose(kv.values[0, :, :final], values[:, 20 - shifted :][:, :final], atol=1e-5)


@kinds
def test_one_section_is_lavida(deep, prompts, fill, shifted):
    """Without blocks."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    assert fill(model, FastDdrive(), prompt=prompts) == fill(model, Lavida(), prompt=prompts)


@kinds
def test_finished_sections_never_change(deep, prompts, shifted):
    """From the step after the next section began."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    _, seen = follow(model, FastDdrive(), prompts[:1], block=4)
    for before, after in pairwise(seen):
        for (final, keys, values), (_, later_keys, later_values) in zip(before, after, strict=True):
            own = slice(0, final - (20 - shifted))
            assert later_keys[:, :, own].equal(keys[:, :, own])
            assert later_values[:, :, own].equal(values[:, :, own])


@pytest.mark.few(4)
@kinds
@pytest.mark.parametrize("fixed", [
    (5, FREE, FREE, 7, 8, FREE), (5, 6, 7, 8, 9, FREE, FREE, 4), (1,) * 12 + (FREE, 2), (1,) * 15,
])
def test_a_scaffold_never_changes(deep, text, shifted, fixed):
    """Fixed tokens stand in the answer, the others are decoded around them, and every step still commits one."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    d, _ = follow(model, FastDdrive(scaffold="x", fixed=fixed), text[None], block=4)
    assert all(own == x for own, x in zip(d.ids[0, 20:].tolist(), fixed, strict=False) if x != FREE)
    writing = Writing(deep, text, 16, shifted)
    for place, token in enumerate(fixed):
        writing.ids[20 + place] = MASK if token == FREE else token
    with torch.no_grad():
        assert d.ids[0, 20:].tolist() == sections(writing, 4, whole=False)[0]
    assert d.steps_done == 16 - sum(x != FREE for x in fixed)


def test_a_scaffold_stands_in_every_sequence_and_leaves_its_block_fewer_tokens(unshifted, prompts):
    """Two of the first block's four tokens are fixed: its two steps commit one each, those of the others two."""
    method = FastDdrive(scaffold="x", fixed=(5, FREE, 7))
    d = Denoising(unshifted, method, prompts, 16, Sampling(steps=8, block=4))
    d.denoise()
    assert d.ids[:, 20].tolist() == [5, 5] and d.ids[:, 22].tolist() == [7, 7]
    assert (d.steps_done, d.facts["tokens_early"]) == (8, 4)


def test_a_scaffold_is_read_from_text(unshifted):
    """Numbers in braces are tokens to decode."""
    method = FastDdrive(scaffold="<5>{2}<7>{1}").bind(unshifted)
    assert method.fixed == (5, FREE, FREE, 7, FREE)
    assert FastDdrive().bind(unshifted).fixed == ()


@pytest.mark.parametrize(("make", "message"), [
    (FastDdrive(scaffold="{17}").bind, r"the scaffold has 17 tokens, and the answer 16\. Use a shorter"),
    (lambda _: FastDdrive(scaffold="x", fixed=(5,) * 16),
     r"the scaffold fixes all 16 tokens of the answer\. Use one with tokens to decode"),
])
def test_a_scaffold_that_does_not_fit_the_answer_is_refused(unshifted, text, fill, make, message):
    """It is longer, or leaves nothing to decode."""
    with pytest.raises(UserError, match=message):
        fill(unshifted, make(unshifted), prompt=text[None])


def test_rollouts_of_one_prompt_store_it_once(unshifted, prompts):
    """Four sequences: one prompt's entries and four answers'; different prompts are stored each. Bytes by hand."""
    entry = 2 * 2 * 16 * 4 * 2  # keys and values, 2 heads of 16, float32, 2 layers
    how = Sampling(steps=16, block=4, temperature=0.8)
    four = denoise(unshifted, FastDdrive(), prompts[:1].expand(4, -1), 16, how)
    assert four.peak_bytes == entry * (20 + 4 * 16)
    assert len({tuple(x) for x in four.ids}) > 1
    assert four.computed_tokens * four.nfe * 4 == 20 + 4 * (4 * 4 * 4 + 3 * 4)
    assert denoise(unshifted, FastDdrive(), prompts, 16, how).peak_bytes == entry * 2 * (20 + 16)


def test_a_rollout_is_the_sequence_alone(unshifted, prompts):
    """Sharing the prompt changes no token."""
    how = Sampling(steps=8, block=4)
    alone = denoise(unshifted, FastDdrive(), prompts[:1], 16, how).ids
    assert denoise(unshifted, FastDdrive(), prompts[:1].expand(3, -1), 16, how).ids == alone * 3


# WeDLM


@pytest.mark.few(4)
@kinds
@pytest.mark.parametrize(
    ("window", "entropy", "penalty"), [(16, None, 0.02), (3, 2.5, 0.0), (1, 3.0, 0.0), (16, 3.5, 0.1)]
)
def test_wedlm_writes_what_its_card_writes(deep, text, shifted, window, entropy, penalty):
    """In as many passes: what is kept is what a pass over everything computes."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    d, _ = follow(model, WeDlm(window=window, entropy=entropy, penalty=penalty), text[None])
    with torch.no_grad():
        written, passes = wedlm(
            Writing(deep, text, 16, shifted), window=window, entropy=entropy, penalty=penalty
        )
    assert d.ids[0, 20:].tolist() == written
    assert d.nfe == passes


@kinds
def test_committed_entries_are_those_of_a_causal_prefill(deep, text, shifted):
    """Of the same text, by the model's own causal attention, in every layer."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    d, _ = follow(model, WeDlm(window=6, entropy=2.0), text[None])
    cache = DynamicCache()
    with attached(deep, "eager"), torch.no_grad():
        deep(d.ids, past_key_values=cache, use_cache=True)
    final = d.stores[0].final
    assert final > 24
    for kv, layer in zip(d.stores, cache.layers, strict=True):
        assert torch.allclose(kv.keys[:, :, :final], layer.keys[:, :, :final], atol=1e-5)
        assert torch.allclose(kv.values[:, :, :final], layer.values[:, :, :final], atol=1e-5)


@kinds
def test_committed_entries_never_change(deep, text, shifted):
    """From the pass on that committed them."""
    model = Model.from_module(deep, masking=Masking(MASK, shifted))
    _, seen = follow(model, WeDlm(window=6, entropy=2.0), text[None])
    for before, after in pairwise(seen):
        for (final, keys, values), (grown, later_keys, later_values) in zip(before, after, strict=True):
            assert grown >= final
            assert later_keys[:, :, :final].equal(keys[:, :, :final])
            assert later_values[:, :, :final].equal(values[:, :, :final])


def test_without_an_entropy_every_pass_commits_one_token(unshifted, text, fill):
    """Sixteen passes."""
    found = fill(unshifted, WeDlm(entropy=None), prompt=text[None])
    assert found.nfe == 16


def test_a_window_of_one_computes_two_rows_per_token(unshifted, text, fill):
    """Each token as a mask and, but for the last, once more as itself; the prompt once."""
    found = fill(unshifted, WeDlm(window=1), prompt=text[None])
    assert (found.nfe, found.computed_tokens * found.nfe) == (16, 20 + 16 + 15)


def test_entropy_decides_and_counts_for_more_farther_behind(unshifted, prompts):
    """By hand: below the limit with the penalty by distance, or the least if none is."""
    d = Denoising(unshifted, WeDlm(), prompts[:1], 16, Sampling(16, 16))
    scores = torch.full((1, 36), -math.inf)
    scores[0, 20:24] = torch.tensor([-1.0, -0.3, -0.37, -0.39])
    wanted = {(0.4, 0.02): [21], (0.4, 0.0): [21, 22, 23], (0.1, 0.0): [21], (0.1, 1.0): [20], (None, 0.0): [21]}
    for (entropy, penalty), places in wanted.items():
        found = WeDlm(entropy=entropy, penalty=penalty).accept(d, scores)
        assert found[0].nonzero()[:, 0].tolist() == places


def test_causal_attention_takes_one_sequence(unshifted, prompts, fill):
    """Windows move by the progress of one."""
    with pytest.raises(UserError, match="one sequence at a time"):
        fill(unshifted, WeDlm())
