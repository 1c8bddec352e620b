"""The claims that every method must keep, tried on tiny models."""

from kvbench.check.invariants import CLAIMS, POLICY_CLAIMS, Claim, check
from kvbench.check.trial import NotApplicableError

__all__ = ["CLAIMS", "POLICY_CLAIMS", "Claim", "NotApplicableError", "check"]
