"""Invariants of methods and audits of tasks: the checks of `kvbench check`."""

from kvbench.check.invariants import INVARIANTS, POLICY_INVARIANTS, InvariantOutcome, check
from kvbench.check.trial import NotApplicableError

__all__ = ["INVARIANTS", "POLICY_INVARIANTS", "InvariantOutcome", "NotApplicableError", "check"]
