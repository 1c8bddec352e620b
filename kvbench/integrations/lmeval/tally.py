"""What became of lm_eval's requests: in how many the method acted, and what was cut or held whole."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UserError
from kvbench.log import say


class NotMeasuredError(UserError):
    """The method never acted: the scores would be the full cache's under its name."""

    exit_code = 1


@dataclass
class Tally:
    """Counts over the requests of one kind (`generate_until`, `loglikelihood`)."""

    requests: int = 0
    acted: int = 0
    """In how many the method changed something, as the stores say."""
    whole: int = 0
    """How many contexts were too short for the budget and were held whole."""
    cut: int = 0
    """How many contexts lost tokens on their left, because they were too long."""
    cut_tokens: int = 0
    full_bytes: int = 0
    stored_bytes: int = 0

    def finish(self, method: str, kind: str, *, lossless: bool) -> None:
        """Say what the method did.

        lossless: its settings are the ones at which it is declared to lose nothing.

        Raises:
            NotMeasuredError: it did nothing, and should have.
        """
        parts = [f"{method} acted in {self.acted} of {self.requests} {kind} requests"]
        if self.full_bytes:
            parts.append(f"caches came to {self.stored_bytes / self.full_bytes:.1%} of the dense bytes")
        if self.whole:
            parts.append(f"{self.whole} contexts were too short for the budget and were held whole")
        if self.cut:
            parts.append(f"{self.cut} contexts lost {self.cut_tokens} tokens on their left")
        say(f"{'; '.join(parts)}.")
        if self.requests and not self.acted and not lossless:
            raise NotMeasuredError(
                f"{method} acted in none of {self.requests} {kind} requests: these scores are not a measurement of "
                "it. Use longer contexts or a smaller budget, or method=full."
            )
