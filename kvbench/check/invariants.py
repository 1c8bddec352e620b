"""What every method must do, whatever its paper says: claims that `kvbench check` tries on tiny random models.

A claim that does not apply to a method says why. The method's card decides: heads that are not independent are not
permuted, and settings that are no identity are not compared with the dense cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.check import diffusion, footprint, logits, traces, turns
from kvbench.check.trial import NotApplicableError
from kvbench.diffusion.policy import Policy
from kvbench.errors import UserError
from kvbench.method import Method

CLAIMS: dict[str, Callable[[Method], str]] = {
    trial.__name__.replace("_", " "): trial
    for trial in (
        traces.settings_are_frozen,
        logits.identity_at_full_budget,
        logits.first_token_is_exact,
        footprint.acts_at_its_budget,
        footprint.measured_bytes_are_declared,
        footprint.old_rows_are_freed,
        footprint.decode_copies_nothing,
        logits.chunks_do_not_matter,
        logits.heads_may_be_permuted,
        logits.batch_does_not_matter,
        turns.three_turns_go_on,
        turns.fork_is_a_fresh_run,
        turns.forced_tokens_are_decode_steps,
        turns.short_prompts_run,
        traces.runs_are_equal_and_apart,
        turns.static_steps_are_eager_ones,
        traces.model_is_restored,
    )
}
"""Of methods of caches, by name, in the order in which they are tried."""

POLICY_CLAIMS: dict[str, Callable[[Policy], str]] = {
    trial.__name__.replace("_", " "): trial
    for trial in (
        traces.settings_are_frozen,
        diffusion.identity_is_no_cache,
        diffusion.it_acts,
        diffusion.answers_are_complete,
        diffusion.what_may_be_committed_is_computed,
        diffusion.bytes_are_counted,
        diffusion.batch_does_not_matter,
        diffusion.short_answers_are_made,
        diffusion.runs_are_equal_and_apart,
    )
}
"""Of cache policies of diffusion models."""


@dataclass(frozen=True)
class Claim:
    """One claim, whether it held, and what was found."""

    name: str
    passed: bool
    detail: str
    seconds: float


def check(kind: type[Method], settings: dict[str, object] | None = None) -> list[Claim]:
    """Try every claim on a method. Failures and exceptions end in the claim, never in a traceback."""
    method = kind(**(settings or {}))  # type: ignore[arg-type]  # the subclass's own fields
    trials: Mapping[str, Callable[[Any], str]] = POLICY_CLAIMS if kind.card.models == "diffusion" else CLAIMS
    claims = []
    for name, trial in trials.items():
        started = time.perf_counter()
        try:
            detail, passed = trial(method), True
        except NotApplicableError as reason:
            detail, passed = f"not applicable: {reason}", True
        except AssertionError as failure:
            detail, passed = str(failure) or "failed", False
        except (UserError, Exception) as error:  # noqa: BLE001  # somebody's method may raise anything
            detail, passed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
        claims.append(Claim(name, passed, detail, time.perf_counter() - started))
    return claims
