"""Generation settings of an lm_eval task: maximum answer length and stop texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvbench.errors import UserError, unknown
from kvbench.machine import load_extra

ASKED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
"""Accepted keys of `generation_kwargs`; the last three have no effect on greedy decoding."""


@dataclass(frozen=True)
class Generation:
    """Greedy decoding of at most `max_new_tokens` tokens, up to the first stop text in `until`."""

    until: tuple[str, ...]
    max_new_tokens: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Read `generation_kwargs`, with lm_eval's defaults.

        Raises:
            UserError: sampling, or a setting that greedy decoding does not support.
        """
        normalize = load_extra("lm_eval.models.utils", extra="lm-eval", what="lm-eval").normalize_gen_kwargs
        found: dict[str, Any] = normalize(dict(given))
        for key in found:
            if key not in ASKED:
                raise unknown("generation setting", key, ASKED, "Decoding is greedy.")
        if found["do_sample"]:
            raise UserError(
                "this task samples, but kvbench decodes greedily, so that methods differ by their caches only. Use "
                "another task, or lm_eval's --gen_kwargs do_sample=False."
            )
        until = found.get("until") or ()
        texts = (until,) if isinstance(until, str) else tuple(until)
        return cls(tuple(x for x in texts if x), found["max_gen_toks"])

    def cut(self, text: str) -> str:
        """The text before the first stop text."""
        return text[: min((text.find(x) for x in self.until if x in text), default=len(text))]

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Stop texts that are single tokens, including special tokens, which decoded answers do not contain."""
        encoded = (tokenizer(x, add_special_tokens=False).input_ids for x in self.until)
        return frozenset(ids[0] for ids in encoded if len(ids) == 1)
