"""Invariants of every method, which `kvbench check` tests on tiny random models.

An invariant that does not apply to a method reports the reason, which follows from the method's card: dependent heads
are not permuted, and settings that are not an identity are not compared with the full cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.check import diffusion, footprint, logits, reuse, traces, turns
from kvbench.check.trial import NotApplicableError, UntestableError
from kvbench.diffusion.policy import Policy
from kvbench.errors import describe_error, find_own_line
from kvbench.hf.tiny import placed
from kvbench.method import Method

INVARIANTS: dict[str, Callable[[Method], str]] = {
    trial.__name__.replace("_", " "): trial
    for trial in (
        traces.settings_are_frozen,
        logits.identity_at_full_budget,
        logits.first_token_is_exact,
        footprint.acts_at_its_budget,
        footprint.measured_bytes_are_declared,
        footprint.state_follows_entries,
        footprint.evicted_entries_are_freed,
        footprint.decode_copies_nothing,
        logits.chunks_do_not_matter,
        logits.heads_may_be_permuted,
        logits.batch_does_not_matter,
        reuse.parts_are_reused,
        turns.turns_continue,
        turns.forks_equal_fresh_runs,
        turns.forced_tokens_equal_decode_steps,
        turns.short_contexts_run,
        traces.runs_are_repeatable,
        turns.static_steps_equal_eager_steps,
        traces.model_is_restored,
    )
}
"""Invariants of methods for autoregressive models, by name, in the order of the tests."""

POLICY_INVARIANTS: dict[str, Callable[[Policy], str]] = {
    trial.__name__.replace("_", " "): trial
    for trial in (
        traces.settings_are_frozen,
        diffusion.identity_equals_no_cache,
        diffusion.acts,
        diffusion.answers_are_complete,
        diffusion.committed_tokens_are_computed,
        diffusion.bytes_are_counted,
        diffusion.batch_does_not_matter,
        diffusion.short_answers_run,
        diffusion.runs_are_repeatable,
    )
}
"""Invariants of cache policies for diffusion models."""


@dataclass(frozen=True)
class InvariantOutcome:
    """The outcome of one invariant."""

    name: str
    passed: bool
    detail: str
    seconds: float


def check(kind: type[Method], settings: dict[str, object] | None = None, device: str = "cpu") -> list[InvariantOutcome]:
    """Test every invariant on a method. A failure or an exception becomes an outcome, never a traceback.

    device: `cpu` for models in float32, or `cuda` for models in bfloat16.

    Raises:
        UserError: the settings keep more entries than the test contexts have.
    """
    with placed(device, torch.float32 if device == "cpu" else torch.bfloat16):
        return _try_all(kind, settings or {})


def _try_all(kind: type[Method], settings: dict[str, object]) -> list[InvariantOutcome]:
    method = kind(**settings)  # type: ignore[arg-type]  # the subclass's own fields
    trials: Mapping[str, Callable[[Any], str]] = POLICY_INVARIANTS if kind.card.models == "diffusion" else INVARIANTS
    outcomes = []
    for name, trial in trials.items():
        started = time.perf_counter()
        try:
            detail, passed = trial(method), True
        except NotApplicableError as reason:
            detail, passed = f"not applicable: {reason}", True
        except UntestableError:
            raise
        except AssertionError as failure:
            detail, passed = (str(failure) or "an assertion failed") + find_own_line(failure, kind.__module__), False
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's method may raise anything
            detail, passed = describe_error(error, kind.__module__), False
        outcomes.append(InvariantOutcome(name, passed, detail, time.perf_counter() - started))
    return outcomes
