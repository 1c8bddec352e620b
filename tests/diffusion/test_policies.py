"""Every policy's exact limit, what it computes, and the traps of its card."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.diffusion.policy import Denoising, PassPlan
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.hf.adapter import attached
from kvbench.methods.diffusion.dkv_cache import DkvCacheDecode, DkvCacheGreedy, DkvCachePd, DkvCachePrefill
from kvbench.methods.diffusion.dllm_cache import DllmCache
from kvbench.methods.diffusion.elastic_cache import ElasticCache
from kvbench.methods.diffusion.fast_ddrive import FastDdrive
from kvbench.methods.diffusion.fast_dllm import FastDllmDual, FastDllmPrefix
from kvbench.methods.diffusion.lavida import Lavida
from kvbench.methods.diffusion.local_leap import LocalLeap
from kvbench.methods.diffusion.multi_block import MultiBlock
from kvbench.methods.diffusion.none import NoCache
from kvbench.methods.diffusion.sparse_dllm import DllmServe, SparseDllm
from kvbench.methods.diffusion.wedlm import WeDlm
from kvbench.methods.diffusion.window_diffusion import WindowDiffusion
from kvbench.registry import list_entries

NEVER = 10**6
RANDOM = {"remasking": "random", "steps": 8}
POLICIES = {
    "none": (NoCache(), {}), "dkv-cache-decode": (DkvCacheDecode(refresh=4), {}),
    "dkv-cache-greedy": (DkvCacheGreedy(), RANDOM), "dkv-cache-prefill": (DkvCachePrefill(), {}),
    "dkv-cache-pd": (DkvCachePd(), {}), "fast-dllm-prefix": (FastDllmPrefix(), {"block": 4}),
    "fast-dllm-dual": (FastDllmDual(), {"block": 4}), "elastic-cache": (ElasticCache(window=4), {}),
    "window-diffusion": (WindowDiffusion(refresh=4, active=3, window=6), {}),
    "local-leap": (LocalLeap(relaxed=0.05), {"threshold": 0.15}), "dllm-cache": (DllmCache(), {}),
    "sparse-dllm": (SparseDllm(), {"block": 4}), "dllm-serve": (DllmServe(), {"block": 4}),
    "multi-block": (MultiBlock(), {"block": 4}), "lavida": (Lavida(), {}), "fast-ddrive": (FastDdrive(), {"block": 4}),
    "wedlm": (WeDlm(entropy=3.5), {}),
}
each_policy = pytest.mark.parametrize(("method", "how"), POLICIES.values(), ids=POLICIES)


def test_every_registered_policy_is_tried_here():
    """A new policy joins these claims."""
    registered = {x.name for x in list_entries("method") if x.models == "diffusion"}
    assert registered == set(POLICIES)


@pytest.fixture
def one(prompts):
    """A single prompt, for policies that take no batch."""
    return prompts[:1]


@pytest.mark.few(6)
@pytest.mark.parametrize(("method", "how"), [
    (DkvCacheDecode(refresh=1), {}), (DkvCacheDecode(refresh=1), {"block": 4}), (DkvCacheGreedy(refresh=1), RANDOM),
    (WindowDiffusion(refresh=1, active=16), {}), (DllmCache(prompt=1, answer=1), {}),
    (DllmCache(prompt=1, answer=NEVER, share=1.0), {}), (DkvCacheDecode(refresh=1), {"threshold": 0.2}),
    (DkvCacheDecode(refresh=1), {"temperature": 0.8}), (FastDllmPrefix(), {"block": 1}), (FastDllmDual(), {"block": 1}),
    (SparseDllm(delay=NEVER), {"block": 4}),
])
def test_all_entries_in_every_pass_is_no_cache(model, fill, method, how):
    """Token for token, whatever the schedule."""
    found = fill(model, method, **how)
    assert found.ids == fill(model, NoCache(), **how).ids
    assert found.computed_tokens == found.sequence_length


@pytest.mark.few(6)
@each_policy
def test_a_policy_leaves_work_out(model, one, fill, method, how):
    """Fewer rows than no cache, or fewer passes; what is counted says so."""
    plain, found = (fill(model, x, prompt=one, **how) for x in (NoCache(), method))
    assert plain.facts == {"tokens_skipped": 0, "entries_unread": 0, "tokens_early": 0}
    if method.card.name == "none":
        assert found == plain
    elif method.card.name == "local-leap":
        assert found.nfe < plain.nfe
        assert found.facts["tokens_early"] > 0
    else:
        assert found.computed_tokens < plain.computed_tokens
        passes = {"multi-block": range(1, 16), "wedlm": range(1, 16), "lavida": [17], "fast-ddrive": [17]}
        assert found.nfe in passes.get(method.card.name, [16 if how.get("steps") is None else how["steps"]])
        assert found.facts["tokens_skipped"] == round((plain.computed_tokens - found.computed_tokens) * found.nfe)
        assert found.peak_bytes > 0


def rows_by_step(model, method, prompt, **how):
    """Places computed in each pass, with what was known when it began."""
    seen = []
    d = Denoising(model, method, prompt, 16, Sampling(**{"steps": 16, "block": 16, **how}), 0)
    run = type(method).run

    class Spy(type(method)):
        def run(self, d, plan, rows):
            seen.append((set(rows[0].tolist()), set(d.known[0].nonzero().flatten().tolist()), d.before[0].clone()))
            return run(self, d, plan, rows)

    spy = object.__new__(Spy)
    spy.__dict__.update(method.__dict__)
    d.method = spy
    d.denoise()
    return seen


def test_dkv_keeps_what_was_decoded_before_the_last_step(unshifted, one):
    """Delayed caching: the cached set at step i is what was decoded when step i - 1 began (card 1.3, oracle b)."""
    steps = rows_by_step(unshifted, DkvCacheDecode(refresh=NEVER), one)
    everything = set(range(36))
    assert [rows for rows, _, _ in steps[:2]] == [everything, everything]
    for (_, known, _), (rows, _, _) in pairwise(steps[1:]):
        assert rows == everything - known
    sizes = [len(rows) for rows, _, _ in steps[2:]]
    assert sizes == [15 - i for i in range(14)]


@pytest.mark.parametrize("shift", ["un", "un_right"])
def test_dkv_on_a_shifted_head_keeps_what_predicts_decoded_tokens(shifted, one, shift):
    """`un`: row p is kept once token p + 1 is decoded, so the last prompt row waits for the first token.

    `un_right`: once its own token is too. There is no second full pass, as in the reference.
    """
    steps = rows_by_step(shifted, DkvCacheDecode(refresh=NEVER, shift=shift), one)
    for (_, known, _), (rows, _, _) in pairwise(steps):
        kept = {p for p in range(35) if p + 1 in known} | {35}  # the roll puts the last row next to the first token
        assert rows == set(range(36)) - (kept if shift == "un" else kept & known)


def test_the_greedy_window_takes_masks_left_and_right_by_turns(unshifted, one):
    """Next to the last step's tokens and those to come, `window` masks around each of them."""
    for window in (0, 2, 4):
        steps = rows_by_step(unshifted, DkvCacheGreedy(refresh=NEVER, window=window), one, remasking="random")
        for (_, before, _), (rows, known, _) in pairwise(steps):
            masks = set(range(20, 36)) - before
            fresh, left = known - before, masks - known
            coming = 1
            assert fresh <= rows
            assert len(rows) == len(fresh) + coming + min(window, len(left) - coming)


def test_the_greedy_window_by_hand():
    """Of a token at 10 and masks from 5 to 13, 9 of which is computed anyway: 11, 8, 12, 7, 13, then the left end."""
    places = torch.arange(16)[None]
    for window, wanted in ((1, {11}), (3, {11, 8, 12}), (5, {11, 8, 12, 7, 13}), (99, {11, 8, 12, 7, 13, 6, 5})):
        near = DkvCacheGreedy(window=window)._near(
            places == 10, (places == 10) | (places == 9), (places >= 5) & (places <= 13)
        )
        assert set(near[0].nonzero().flatten().tolist()) == wanted


def test_the_greedy_order_needs_random_remasking(model, fill):
    """The card: low confidence raises."""
    with pytest.raises(UserError, match="remasking=random"):
        fill(model, DkvCacheGreedy())


def test_prefill_computes_the_prompt_once(model, one):
    """All but the row that predicts the first token."""
    shift = int(model.masking.shifted)
    steps = rows_by_step(model, DkvCachePrefill(), one, block=4)
    assert [len(rows) for rows, _, _ in steps] == [36] + [16 + shift] * 15
    pd = rows_by_step(model, DkvCachePd(), one)
    assert all(min(rows) >= 20 - shift for rows, _, _ in pd[1:])


def test_dual_is_prefix_where_nothing_is_behind_the_block(model, fill):
    """One block: both compute the answer and read the prompt."""
    assert fill(model, FastDllmDual()) == fill(model, FastDllmPrefix())


@pytest.mark.few(6)
@pytest.mark.parametrize("how", [
    {"block": 4}, {"block": 4, "steps": 8}, {"block": 8, "threshold": 0.2}, {"block": 4, "temperature": 0.8},
    {"block": 4, "remasking": "random"}, {},
])
def test_one_running_block_is_single_block_decoding(model, one, fill, how):
    """Tokens, passes, rows and reads of fast-dllm-prefix, on every schedule (card A3.12)."""
    single, ours = (fill(model, x, prompt=one, **how) for x in (FastDllmPrefix(), MultiBlock(blocks=1)))
    assert replace(ours, peak_bytes=0) == replace(single, peak_bytes=0)
    ages = 2 * (16 // how.get("block", 16))  # the step of each block, in 16 bits
    assert ours.peak_bytes == single.peak_bytes + ages


def test_blocks_that_run_ahead_are_computed_until_all_before_them_are_complete(unshifted, one):
    """A complete block behind an unfinished one is computed in every pass: its entries are not kept yet."""
    steps = rows_by_step(unshifted, MultiBlock(blocks=4, add=0.0), one, block=4, steps=16)
    assert len(steps) == 4  # each of the four blocks commits a token per step
    for number, (rows, known, _) in enumerate(steps):
        first = min(set(range(20, 36)) - known) // 4 * 4
        assert rows == (set(range(36)) if number == 0 else set(range(first, 36)))


def test_the_next_block_joins_when_enough_of_the_last_is_decoded(unshifted, one):
    """At a share of one half, block b joins two steps after block b - 1: passes by hand."""
    steps = rows_by_step(unshifted, MultiBlock(blocks=4, add=0.5), one, block=4)
    counts = [[len(known & set(range(20 + 4 * b, 24 + 4 * b))) for b in range(4)] for _, known, _ in steps]
    assert counts == [
        [0, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [3, 1, 0, 0], [4, 2, 0, 0], [4, 3, 1, 0], [4, 4, 2, 0], [4, 4, 3, 1],
        [4, 4, 4, 2], [4, 4, 4, 3],
    ]


@pytest.mark.parametrize(("add", "steps", "counts"), [
    (0.0, 6, [[0, 0, 0, 0], [2, 2, 4, 4]]),  # two steps for each of the first two blocks, one for the others
    (0.25, 12, [  # three steps for each block, counted from its own first: two tokens, one, one
        [0, 0, 0, 0], [2, 0, 0, 0], [3, 2, 0, 0], [4, 3, 2, 0], [4, 4, 3, 2], [4, 4, 4, 3],
    ]),
])
def test_each_running_block_commits_by_its_own_schedule(unshifted, one, add, steps, counts):
    """Tokens of each block before each step, by hand."""
    found = rows_by_step(unshifted, MultiBlock(blocks=4, add=add), one, block=4, steps=steps)
    assert [[len(known & set(range(20 + 4 * b, 24 + 4 * b))) for b in range(4)] for _, known, _ in found] == counts


def test_a_block_after_one_that_is_ready_commits_a_token_in_every_step(unshifted, one, fill):
    """Under a threshold that no token reaches: ready 0 gives a token per running block, ready 1 one per step."""
    how = {"prompt": one, "block": 4, "threshold": 1.0}
    each = fill(unshifted, MultiBlock(add=0.0, ready=0.0), **how)
    alone = fill(unshifted, MultiBlock(add=0.0, ready=1.0), **how)
    assert (each.nfe, alone.nfe) == (4, 16)


def test_sparse_with_everything_kept_is_the_dual_cache(unshifted, fill):
    """keep 1 and no delay: the rows outside the block as the first pass left them (card 1.9, oracle)."""
    dual, sparse = (fill(unshifted, x, block=4) for x in (FastDllmDual(), SparseDllm(keep=1.0, delay=0)))
    assert sparse.ids == dual.ids
    assert sparse.computed_tokens == dual.computed_tokens


def test_sparse_frees_what_it_does_not_keep(unshifted, fill):
    """Bytes follow the kept share of the 32 rows outside a block of 4."""
    row = 2 * 2 * 16 * 4 * 2 * 2  # keys and values, 2 heads of 16, float32, 2 layers, 2 sequences
    for share in (0.25, 0.5, 1.0):
        assert fill(unshifted, SparseDllm(keep=share), block=4).peak_bytes == int(share * 32) * row


@pytest.mark.parametrize(("method", "kept"), [(SparseDllm, 0), (DllmServe, 1)])
def test_dllm_serve_keeps_one_entry_at_least(unshifted, fill, method, kept):
    """A share of 32 rows that is less than one: its engine rounds up, Sparse-dLLM's code down."""
    row = 2 * 2 * 16 * 4 * 2 * 2  # keys and values, 2 heads of 16, float32, 2 layers, 2 sequences
    assert fill(unshifted, method(keep=0.03), block=4).peak_bytes == kept * row


def test_dllm_serve_has_no_entry_to_keep_where_the_block_is_everything(unshifted, fill):
    """A prompt of no tokens, one block: the least of one entry does not apply."""
    nothing = torch.empty(1, 0, dtype=torch.long)
    assert fill(unshifted, DllmServe(keep=0.5), prompt=nothing, answer=4).peak_bytes == 0


def test_elastic_without_drift_is_dkv_without_refresh(unshifted, one, fill):
    """gamma -1, nothing tracked, a window of all masks: the card's oracle (b)."""
    ours = fill(unshifted, ElasticCache(gamma=-1.0, tracked=0, window=NEVER), prompt=one)
    theirs = fill(unshifted, DkvCacheDecode(refresh=NEVER, first=1), prompt=one)
    assert ours.ids == theirs.ids
    assert ours.computed_tokens == theirs.computed_tokens


def test_elastic_resets_above_the_first_layer_where_gamma_is_above_1(model, one, fill):
    """The recomputed share is (L - 1) / L after the first pass (oracle c): of two layers all rows of the second."""
    method = ElasticCache(gamma=2.0, window=4)
    steps = [len(rows) for rows, _, _ in rows_by_step(model, method, one)]
    found = fill(model, method, prompt=one)
    assert steps[0] == 36
    assert found.computed_tokens * found.nfe == 36 + sum((rows + 36) / 2 for rows in steps[1:])


def test_elastic_with_nothing_tracked_resets_no_layer(unshifted, one, fill):
    """The test is of tracked rows: where there are none, no gamma asks for one (card 1.5, 2d)."""
    high, low = (fill(unshifted, ElasticCache(gamma=x, tracked=0), prompt=one) for x in (2.0, -1.0))
    assert high == low


def test_elastic_with_all_entries_in_every_pass_is_no_cache(model, one, fill):
    """The exact limit of its card (oracle a)."""

    class Whole(ElasticCache):
        def plan(self, d):
            return PassPlan()

    found, plain = (fill(model, x, prompt=one) for x in (Whole(window=NEVER), NoCache()))
    assert found.ids == plain.ids
    assert found.computed_tokens == plain.computed_tokens


def test_elastic_watches_the_row_that_the_window_looks_at(unshifted, one):
    """Of the decoded rows the one with the most attention, in each layer; by hand in the first."""
    d = Denoising(unshifted, ElasticCache(window=4), one, 16, Sampling(steps=16, block=16))
    with attached(unshifted.module), torch.no_grad():
        d._begin(20)
        masked = d.masked[0]
        d._advance()
    kv = d.stores[0]
    queries = kv.state["query"][0, :, 20:24].view(2, 2, 4, 16)
    mass = (queries @ kv.keys[0, :, None].transpose(2, 3) * 16**-0.5).softmax(-1).sum((0, 1, 2))
    best = int(mass.masked_fill(masked, 0).argmax())
    assert bool(d.notes["tracked"][0, best])
    assert int(d.notes["tracked"].sum()) <= 2


def test_far_masks_are_not_looked_at(unshifted, one):
    """A cached value outside the window has no weight: perturbed, nothing changes (card 1.6)."""
    answers = []
    for noise in (0.0, 100.0):
        method = WindowDiffusion(refresh=NEVER, active=3, window=6)
        d = Denoising(unshifted, method, one, 16, Sampling(steps=16, block=16), 0)
        with attached(unshifted.module), torch.no_grad():
            d._begin(20)
            d._advance()
            d._advance()
            outside = ~d.notes["window"][0]
            assert int(outside.sum()) == 16 - 1 - 6
            for kv in d.stores:
                kv.values[:, :, outside] += noise
            d._advance()
            d._advance()
        answers.append(d.ids.tolist())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", [LocalLeap(relaxed=0.3), LocalLeap(relaxed=0.0, radius=0)])
def test_local_leap_without_relaxation_is_the_threshold(model, fill, method):
    """The same tokens in as many passes (card 1.7)."""
    assert fill(model, method, threshold=0.3) == fill(model, NoCache(), threshold=0.3)


CONFIDENCES = st.lists(st.floats(0, 1) | st.just(-float("inf")), min_size=1, max_size=12)


@given(CONFIDENCES, st.integers(0, 3))
def test_local_leap_accepts_near_anchors(confidence, radius):
    """By hand: above 0.9; above 0.6 within the radius of one above 0.9; the surest, if there is a candidate."""
    method = LocalLeap(relaxed=0.6, radius=radius)
    d = SimpleNamespace(sampling=Sampling(1, 1, threshold=0.9), quota=torch.ones(1, dtype=torch.long))
    scores = torch.tensor([confidence])
    found = method.accept(d, scores)[0].tolist()
    scores = scores[0].tolist()  # in float32
    anchors = [i for i, x in enumerate(scores) if x >= torch.tensor(0.9)]
    wanted = {i for i, x in enumerate(scores) if x >= torch.tensor(0.6) and any(abs(i - a) <= radius for a in anchors)}
    wanted |= {*anchors} | ({scores.index(max(scores))} if max(scores) >= 0 else set())
    assert {i for i, x in enumerate(found) if x} == wanted


@pytest.mark.parametrize(("method", "how", "message"), [
    (LocalLeap(), {}, "give a higher one, such as --gen threshold=0.9"),
    (LocalLeap(), {"threshold": 0.5}, "relaxes a threshold to 0.75"),
    (LocalLeap(relaxed=0.95), {"threshold": 0.9}, "a higher one, such as --gen threshold=0.975"),
    (WindowDiffusion(), {"block": 4}, "leave --gen block out"),
    (WindowDiffusion(active=1, window=4), {"steps": 4}, "a step commits 4"),
    (ElasticCache(), {"block": 4}, "leave --gen block out"), (WeDlm(), {"block": 4}, "leave --gen block out"),
    (WeDlm(), {"threshold": 0.9}, "use --set entropy=0.4"), (WeDlm(), {"remasking": "random"}, "by their entropy"),
    (FastDdrive(), {"block": 5}, "block=5 does not divide a response block of 16 tokens. Use one of"),
    (ElasticCache(window=4), {"steps": 2}, "a step commits 8. Use more --gen steps, or --set window=8 or more"),
])
def test_a_regime_without_meaning_is_refused(model, one, fill, method, how, message):
    """With the next step."""
    with pytest.raises(UserError, match=message):
        fill(model, method, prompt=one, **how)


@pytest.mark.parametrize(("kind", "settings", "message"), [
    (DkvCacheDecode, {"refresh": 0}, "refresh must be 1 or more, got 0"),
    (DkvCachePd, {"refresh": 0}, "refresh must be 1 or more, got 0"),
    (DkvCacheDecode, {"first": 0}, "first must be 1 or more, got 0"),
    (WindowDiffusion, {"active": 9, "window": 8}, "active must be at most window 8, got 9"),
    (LocalLeap, {"relaxed": 1.5}, "relaxed must be between 0 and 1, got 1.5"),
    (DllmCache, {"share": 2.0}, "share must be between 0 and 1, got 2.0"),
    (SparseDllm, {"keep": 0.0}, "keep must be above 0 and at most 1, got 0.0"),
    (SparseDllm, {"pool": 2}, "pool must be odd and 1 or more, got 2"),
    (ElasticCache, {"window": 0}, "window must be 1 or more, got 0"),
    (Lavida, {"factor": 0.0}, "factor must be above 0, got 0.0"),
    (WeDlm, {"window": 0}, "window must be 1 or more, got 0"),
    (MultiBlock, {"blocks": 0}, "blocks must be 1 or more, got 0"),
    (MultiBlock, {"add": 1.5}, "add must be between 0 and 1, got 1.5"),
])
def test_settings_without_meaning_are_refused(kind, settings, message):
    """Before a model runs, with the value and the rule."""
    with pytest.raises(UserError, match=message):
        kind(**settings)


def test_dllm_cache_computes_the_share_that_changed(unshifted, fill):
    """Between full passes: layer 0 whole, and a quarter of the 16 answer rows above it."""
    found = fill(unshifted, DllmCache(prompt=NEVER, answer=NEVER, share=0.25))
    assert found.computed_tokens == pytest.approx((36 * 2 + 15 * (36 + 4)) / 2 / 16)


def test_a_running_set_takes_one_sequence(unshifted, prompts, fill):
    """Blocks join by the progress of one sequence."""
    with pytest.raises(UserError, match="one sequence at a time"):
        fill(unshifted, MultiBlock(), prompt=prompts, block=4)
