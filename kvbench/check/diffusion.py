"""Invariants of cache policies for diffusion models, tested on two tiny models, with and without a shifted head.

Sampling settings that a policy refuses are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.check.traces import look_at
from kvbench.check.trial import NotApplicableError, find_tensors
from kvbench.diffusion.policy import Denoised, Denoising, Policy, denoise
from kvbench.diffusion.sample import Uncached
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import VOCABULARY, tiny_diffusion
from kvbench.store import storage_bytes

PROMPT, ANSWER = 20, 16
REGIMES = {
    "one block": Sampling(steps=16, block=16), "blocks": Sampling(steps=16, block=4),
    "few steps and noise": Sampling(steps=6, block=16, temperature=0.8),
    "threshold": Sampling(steps=16, block=16, threshold=0.9),
    "random order": Sampling(steps=8, block=8, remasking="random"),
}


def _prompts(count: int = 1) -> Tensor:
    ids = torch.randint(VOCABULARY - 1, (count, PROMPT), generator=torch.Generator().manual_seed(1))
    return ids.to(tiny_diffusion(shifted=False).device)


def _taken(policy: Policy) -> Iterator[tuple[str, Model, Sampling]]:
    """The sampling settings that a policy accepts, on both models."""
    found = 0
    for name, sampling in REGIMES.items():
        try:
            policy.check(sampling, ANSWER)
        except UserError:
            continue
        found += 1
        for model in (tiny_diffusion(shifted=False), tiny_diffusion(shifted=True)):
            yield f"{name}, {model.id}", model, sampling
    assert found, f"it accepts none of the sampling settings {', '.join(REGIMES)}"


def _fill(policy: Policy, model: Model, sampling: Sampling, prompts: Tensor | None = None) -> Denoised:
    return denoise(model, policy, _prompts() if prompts is None else prompts, ANSWER, sampling)


def _follow(policy: Policy, model: Model, sampling: Sampling, **spies: Callable[..., None]) -> Denoising:
    """Denoise an answer, and call each spy before the policy's method of its name, with the same arguments."""

    def spied(name: str) -> Callable[..., object]:
        def call(self: Policy, *given: object) -> object:
            spies[name](*given)
            return getattr(type(policy), name)(self, *given)

        return call

    watched: Policy = type("Spied", (type(policy),), {name: spied(name) for name in spies})(**policy.settings)
    d = Denoising(model, watched, _prompts(), ANSWER, sampling)
    d.denoise()
    return d


def identity_equals_no_cache(policy: Policy) -> str:
    """Settings that are declared lossless give the tokens of no cache and compute every token."""
    if not policy.identity(tiny_diffusion(shifted=False).shape(PROMPT + ANSWER)):
        raise NotApplicableError("its settings are not declared lossless")
    names = []
    for name, model, sampling in _taken(policy):
        ours, plain = (_fill(x, model, sampling) for x in (policy, Uncached()))
        assert ours.ids == plain.ids, f"{name}: other tokens than without a cache"
        assert not any(ours.facts.values()), f"{name}: it left out {ours.facts}"
        names.append(name)
    return f"equal tokens in {len(names)} runs"


def acts(policy: Policy) -> str:
    """The loop counts skipped tokens or early commits; the same settings without hooks show none."""
    if policy.identity(tiny_diffusion(shifted=False).shape(PROMPT + ANSWER)):
        raise NotApplicableError("its settings are declared lossless")
    hooks = {name: getattr(Policy, name) for name in ("run", "look", "open", "accept", "commit", "begin")}
    inert = type("Inert", (type(policy),), {**hooks, "plan": Uncached.plan})
    acted = 0
    for name, model, sampling in _taken(policy):
        none = _fill(inert(**policy.settings), model, sampling)
        assert not any(none.facts.values()), f"{name}: a policy that does nothing passes as well: {none.facts}"
        acted += any(_fill(policy, model, sampling).facts.values())
    assert acted, "no denoising step skipped a token, and none committed one early"
    return f"acted in {acted} runs; a policy that does nothing is caught"


def answers_are_complete(policy: Policy) -> str:
    """Every position gets a token other than the mask once; the prompt and committed tokens never change."""
    passes = []
    for name, model, sampling in _taken(policy):
        before = torch.cat([_prompts(), torch.full((1, ANSWER), VOCABULARY - 1, device=model.device)], dim=1)

        def look(d: Denoising, accepted: Tensor, name: str = name, before: Tensor = before) -> None:
            changed = d.ids != before
            assert bool((before[changed] == VOCABULARY - 1).all()), f"{name}: a token was changed"
            assert changed.equal(accepted), f"{name}: a token was written that was not accepted"
            before.copy_(d.ids)

        d = _follow(policy, model, sampling, commit=look)
        assert not bool((d.ids == VOCABULARY - 1).any()), f"{name}: masks are left"
        passes.append(d.nfe)
    return f"{min(passes)} to {max(passes)} denoising steps for {ANSWER} tokens"


def committed_tokens_are_computed(policy: Policy) -> str:
    """Confidences exist for every open position; in random order, for as many as are committed."""
    for name, model, sampling in _taken(policy):

        def look(d: Denoising, confidence: Tensor, name: str = name) -> None:
            known = confidence.isfinite()
            if d.sampling.remasking == "random":
                assert bool((known.sum(-1) >= d.quota).all()), f"{name}: too few tokens are computed in step {d.step}"
            else:
                lacks = (d.method.open(d) & ~known).nonzero()[:, 1].tolist()
                assert not lacks, f"{name}: positions {lacks} may be committed in step {d.step} and are not computed"

        _follow(policy, model, sampling, accept=look)
    return "in every step, also with a shifted head"


def bytes_are_counted(policy: Policy) -> str:
    """The reported bytes include every tensor of the stores."""
    most = 0
    for name, model, sampling in _taken(policy):
        def look(d: Denoising, accepted: Tensor, name: str = name) -> None:
            del accepted
            held = storage_bytes(find_tensors(d.stores))
            counted = sum(x.nbytes() for x in d.stores)
            assert counted >= held, f"{name}: its stores hold {held} bytes and count {counted}"

        most = max(most, _follow(policy, model, sampling, commit=look).peak_bytes)
    return f"at most {most} bytes"


def batch_does_not_matter(policy: Policy) -> str:
    """Each of two sequences in a batch gets the tokens that it gets alone, or the policy refuses batches."""
    count = 0
    for name, model, sampling in _taken(policy):
        if sampling.temperature or sampling.remasking == "random":
            continue  # random draws are made for the whole batch
        try:
            both = _fill(policy, model, sampling, _prompts(2)).ids
        except UserError as refusal:
            raise NotApplicableError(str(refusal)) from refusal
        alone = [_fill(policy, model, sampling, x[None]).ids[0] for x in _prompts(2)]
        assert both == alone, f"{name}: a sequence depends on its batch"
        count += 1
    if not count:
        raise NotApplicableError("all accepted sampling settings draw for the whole batch")
    return f"equal tokens in {count} runs"


def short_answers_run(policy: Policy) -> str:
    """Response blocks of one, two and three tokens after a prompt of one token are filled."""
    for answer in (1, 2, 3):
        for base in REGIMES.values():
            sampling = Sampling(answer, answer, base.remasking, base.temperature, base.threshold)
            try:
                policy.check(sampling, answer)
            except UserError:
                continue
            for shifted in (False, True):
                ids = denoise(tiny_diffusion(shifted=shifted), policy, [5], answer, sampling).ids[0]
                assert len(ids) == answer and VOCABULARY - 1 not in ids, f"{answer} tokens: masks are left"
    return "1, 2 and 3 tokens"


def runs_are_repeatable(policy: Policy) -> str:
    """Two runs are equal, with another one in between, and the model is not changed."""
    for name, model, sampling in _taken(policy):
        before = look_at(model)
        first = _fill(policy, model, sampling)
        _fill(policy, model, sampling, _prompts(1).flip(-1))
        assert _fill(policy, model, sampling) == first, f"{name}: a second run differs"
        assert look_at(model) == before, f"{name}: the model was left changed"
    return "tokens, denoising steps, computed tokens and bytes equal"
