"""What every cache policy of diffusion models must do, tried on two tiny ones: a head that is shifted, one that is not.

A regime that a policy refuses is left out; one that it takes, it must fill as no cache does, but for the rows it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.check.traces import look_at
from kvbench.check.trial import NotApplicableError
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
    return torch.randint(VOCABULARY - 1, (count, PROMPT), generator=torch.Generator().manual_seed(1))


def _taken(policy: Policy) -> Iterator[tuple[str, Model, Sampling]]:
    """The regimes that it takes, on both models."""
    found = 0
    for name, sampling in REGIMES.items():
        try:
            policy.check(sampling, ANSWER)
        except UserError:
            continue
        found += 1
        for model in (tiny_diffusion(shifted=False), tiny_diffusion(shifted=True)):
            yield f"{name}, {model.id}", model, sampling
    assert found, f"it takes none of the regimes {', '.join(REGIMES)}"


def _fill(policy: Policy, model: Model, sampling: Sampling, prompts: Tensor | None = None) -> Denoised:
    return denoise(model, policy, _prompts() if prompts is None else prompts, ANSWER, sampling)


def _follow(policy: Policy, model: Model, sampling: Sampling, **spies: Callable[..., None]) -> Denoising:
    """An answer made while spies are called before the policy's methods of their names, with the same arguments."""

    def spied(name: str) -> Callable[..., object]:
        def call(self: Policy, *given: object) -> object:
            spies[name](*given)
            return getattr(type(policy), name)(self, *given)

        return call

    twin: Policy = type("Spied", (type(policy),), {name: spied(name) for name in spies})(**policy.settings)
    d = Denoising(model, twin, _prompts(), ANSWER, sampling)
    d.denoise()
    return d


def identity_is_no_cache(policy: Policy) -> str:
    """Settings that are declared to lose nothing make the tokens of no cache and compute all rows."""
    if not policy.identity(tiny_diffusion(shifted=False).shape(PROMPT + ANSWER)):
        raise NotApplicableError("its settings are no declared identity")
    names = []
    for name, model, sampling in _taken(policy):
        ours, plain = (_fill(x, model, sampling) for x in (policy, Uncached()))
        assert ours.ids == plain.ids, f"{name}: other tokens than without a cache"
        assert not any(ours.facts.values()), f"{name}: it left out {ours.facts}"
        names.append(name)
    return f"equal tokens in {len(names)} runs"


def it_acts(policy: Policy) -> str:
    """The loop can prove that something was left out or came early, and an inert twin's cannot."""
    if policy.identity(tiny_diffusion(shifted=False).shape(PROMPT + ANSWER)):
        raise NotApplicableError("its settings are declared to lose nothing")
    hooks = {name: getattr(Policy, name) for name in ("run", "look", "open", "accept", "commit", "begin")}
    inert = type("Inert", (type(policy),), {**hooks, "plan": Uncached.plan})
    acted = 0
    for name, model, sampling in _taken(policy):
        twin = _fill(inert(**policy.settings), model, sampling)
        assert not any(twin.facts.values()), f"{name}: a twin that does nothing is certified as well: {twin.facts}"
        acted += any(_fill(policy, model, sampling).facts.values())
    assert acted, "no pass left a row out, and no token came early"
    return f"acted in {acted} runs; an inert twin is caught"


def answers_are_complete(policy: Policy) -> str:
    """Every place gets a token that is not the mask, once; the prompt and what was committed never change."""
    passes = []
    for name, model, sampling in _taken(policy):
        before = torch.cat([_prompts(), torch.full((1, ANSWER), VOCABULARY - 1)], dim=1)

        def look(d: Denoising, accepted: Tensor, name: str = name, before: Tensor = before) -> None:
            changed = d.ids != before
            assert bool((before[changed] == VOCABULARY - 1).all()), f"{name}: a token was changed"
            assert changed.equal(accepted), f"{name}: a token was written that was not accepted"
            before.copy_(d.ids)

        d = _follow(policy, model, sampling, commit=look)
        assert not bool((d.ids == VOCABULARY - 1).any()), f"{name}: masks are left"
        passes.append(d.nfe)
    return f"{min(passes)} to {max(passes)} passes for {ANSWER} tokens"


def what_may_be_committed_is_computed(policy: Policy) -> str:
    """Where confidence decides, every open place has one; in a known order, as many as are to be committed."""
    for name, model, sampling in _taken(policy):

        def look(d: Denoising, confidence: Tensor, name: str = name) -> None:
            known = confidence.isfinite()
            if d.sampling.remasking == "random":
                assert bool((known.sum(-1) >= d.quota).all()), f"{name}: too few tokens are computed in step {d.step}"
            else:
                lacks = (d.method.open(d) & ~known).nonzero()[:, 1].tolist()
                assert not lacks, f"{name}: places {lacks} may be committed in step {d.step} and are not computed"

        _follow(policy, model, sampling, accept=look)
    return "in every step, also where the row before a place predicts it"


def bytes_are_counted(policy: Policy) -> str:
    """Every tensor that its stores hold is in the bytes that are reported."""
    most = 0

    def tensors(value: object) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return [x for part in inner for x in tensors(part)]

    for name, model, sampling in _taken(policy):
        def look(d: Denoising, accepted: Tensor, name: str = name) -> None:
            del accepted
            held = storage_bytes(x for store in d.stores for x in tensors(vars(store)))
            counted = sum(x.nbytes() for x in d.stores)
            assert counted >= held, f"{name}: its stores hold {held} bytes and count {counted}"

        most = max(most, _follow(policy, model, sampling, commit=look).peak_bytes)
    return f"at most {most} bytes"


def batch_does_not_matter(policy: Policy) -> str:
    """Two sequences at once get what each gets alone, or the policy says that it takes one."""
    count = 0
    for name, model, sampling in _taken(policy):
        if sampling.temperature or sampling.remasking == "random":
            continue  # what is drawn is drawn for the batch
        try:
            both = _fill(policy, model, sampling, _prompts(2)).ids
        except UserError as refusal:
            raise NotApplicableError(str(refusal)) from refusal
        alone = [_fill(policy, model, sampling, x[None]).ids[0] for x in _prompts(2)]
        assert both == alone, f"{name}: a sequence depends on its batch"
        count += 1
    if not count:
        raise NotApplicableError("it takes only regimes in which something is drawn for the batch")
    return f"equal tokens in {count} runs"


def short_answers_are_made(policy: Policy) -> str:
    """Canvases of one, two and three tokens after a prompt of one."""
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


def runs_are_equal_and_apart(policy: Policy) -> str:
    """Two runs are equal, with another in between, and the model is left as it was."""
    for name, model, sampling in _taken(policy):
        before = look_at(model)
        first = _fill(policy, model, sampling)
        _fill(policy, model, sampling, _prompts(1).flip(-1))
        assert _fill(policy, model, sampling) == first, f"{name}: a second run differs"
        assert look_at(model) == before, f"{name}: the model was left changed"
    return "tokens, passes, rows and bytes equal"
