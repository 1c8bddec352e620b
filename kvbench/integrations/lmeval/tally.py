"""Effect counters over lm_eval's requests: in how many the method acted, and how many were cut or kept in full."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UserError
from kvbench.log import say


class NotMeasuredError(UserError):
    """The method never acted, so the scores are those of the full cache."""

    exit_code = 1


@dataclass
class Tally:
    """Counts over the requests of one kind (`generate_until`, `loglikelihood`)."""

    requests: int = 0
    acted: int = 0
    """Requests in which the method changed the cache, counted by the stores, and a token was predicted from it."""
    prefilled: int = 0
    """Requests of one token, which the exact prefill predicts before the cache is compressed."""
    uncompressed: int = 0
    """Contexts too short for the budget, kept in full."""
    cut: int = 0
    """Contexts that were too long and lost tokens on the left."""
    cut_tokens: int = 0
    full_bytes: int = 0
    stored_bytes: int = 0

    def finish(self, method: str, kind: str, *, lossless: bool) -> None:
        """Print the counts.

        lossless: True if the method declares that it loses nothing at its settings.

        Raises:
            NotMeasuredError: the method never acted and is not lossless.
        """
        parts = [f"{method} acted in {self.acted} of {self.requests} {kind} requests"]
        if self.full_bytes:
            parts.append(f"caches stored {self.stored_bytes / self.full_bytes:.1%} of the full cache's bytes")
        if self.uncompressed:
            parts.append(f"{self.uncompressed} contexts were too short for the budget and were kept in full")
        if self.prefilled:
            parts.append(f"{self.prefilled} have one token, which the prefill predicts before the cache is compressed")
        if self.cut:
            parts.append(f"{self.cut} contexts lost {self.cut_tokens} tokens on their left")
        say(f"{'; '.join(parts)}.")
        if self.requests and not self.acted and not lossless:
            raise NotMeasuredError(
                f"{method} acted in none of {self.requests} {kind} requests: these scores are not a measurement of "
                "it. Use longer contexts, a smaller budget or a task with longer answers, or method=full."
            )
