"""What a task of lm_eval asks of a generated answer: how long it may be, and at which texts it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvbench.errors import UserError, unknown
from kvbench.extras import load_extra

ASKED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
"""What is read of `generation_kwargs`; the last three mean nothing where decoding is greedy."""


@dataclass(frozen=True)
class Generation:
    """Greedy decoding of at most `limit` tokens, up to the first of the texts in `until`."""

    until: tuple[str, ...]
    limit: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From `generation_kwargs`, with lm_eval's own defaults.

        Raises:
            UserError: sampling, or a setting that greedy decoding has no meaning for.
        """
        normalize = load_extra("lm_eval.models.utils", extra="lm-eval", what="lm-eval").normalize_gen_kwargs
        found: dict[str, Any] = normalize(dict(given))
        for key in found:
            if key not in ASKED:
                raise unknown("generation setting", key, ASKED, "Decoding is greedy.")
        if found["do_sample"]:
            raise UserError(
                "this task samples, and kvbench decodes greedily: a difference between methods would be luck. Use "
                "another task, or lm_eval's --gen_kwargs do_sample=False."
            )
        until = found.get("until") or ()
        texts = (until,) if isinstance(until, str) else tuple(until)
        return cls(tuple(x for x in texts if x), found["max_gen_toks"])

    def cut(self, text: str) -> str:
        """What stands before the first of the texts that end an answer."""
        return text[: min((text.find(x) for x in self.until if x in text), default=len(text))]

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Those of the texts that are one token, special ones among them, which decoded answers do not show."""
        encoded = (tokenizer(x, add_special_tokens=False).input_ids for x in self.until)
        return frozenset(ids[0] for ids in encoded if len(ids) == 1)
