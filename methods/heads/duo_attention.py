"""DuoAttention: retrieval heads keep every entry, streaming heads keep sinks and a sliding window."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvbench.constraints import Natural, Positive, Share
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.methods.heads.groups import LEAST_SHARE, Head, HeadMethod, by_score
from kvbench.methods.heads.profile import Scores, find_profile

if TYPE_CHECKING:
    from kvbench.hf import Model

HINT = "Use the authors' full_attention_heads.tsv: a line per layer, one number per KV head, separated by tabs."


@dataclass(frozen=True)
class DuoAttention(HeadMethod):
    """Heads with large gates keep every entry; the others keep `sinks` first entries and a window of recent ones."""

    sinks: Natural = 64
    recent: Positive = 256
    sparsity: Share = 0.5
    """Share of streaming heads with `--budget paper`."""
    gates: str | None = None
    """Path of trained gates, the authors' `full_attention_heads.tsv`; None: use a head profile instead."""
    gates_sha256: str | None = None
    """SHA-256 of that file, filled in from it; a different value is refused."""

    card: ClassVar[Card] = Card(
        name="duo-attention",
        title="DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
        idea="A trained gate per KV head tells which heads need the whole context. "
        "These keep every entry; the others keep sinks and a window of constant size.",
        arxiv="2410.10819",
        year=2024,
        family="heads",
        stages=("compression",),
        budget=BudgetKind.STORED,
        calibration="head profile, or trained gates",
        paper_budget="a share `sparsity` of the heads keeps `sinks` and `recent` entries, the others keep every entry",
        heads="indexed",
        upstream=Upstream(repo="mit-han-lab/duo-attention", commit="03dca842639c64ed0d0daf9042da845cdea44637",
                          license="MIT"),
        deviations=(
            ("Without a file of gates, heads are ranked by the induction score of a head profile, which is measured in "
            "seconds; it is not the same as the paper's gates, which are trained on passkeys."),
            ("Only --budget paper follows the paper. Another budget gives as many retrieval heads as possible while "
            "the others keep `sinks` and `recent` entries, or a fifth of the mean entries per head if that is less; "
            "the rest widens their windows. Narrower windows have proportionally fewer sinks."),
            "All heads use full attention in the prompt; the authors' code streams it in chunks.",
            ("Within a question, windows slide once at its end, so that results do not depend on chunks."),
            "The weights of the heads are not permuted: entries are in two stores, and outputs are put in order.",
            "Equal gates are ordered by layer and head; the authors add noise.",
        ),
        limits=(
            "Streaming heads lose the middle of the text.",
            ("A model that does not copy random tokens, such as the bundled one, shows no retrieval heads in a head "
            "profile, so the ranking is noise."),
            "A file of gates names no model: any file with the right number of layers and heads is accepted.",
            ("In sliding layers whose window is shorter than the context, streaming heads keep only recent entries: "
            "the first tokens are outside. Longer windows keep sinks until the conversation outgrows them."),
        ),
    )

    def __post_init__(self) -> None:
        """Refuse a file of gates that is invalid or has another hash (`UserError`)."""
        super().__post_init__()
        if self.gates is None:
            if self.gates_sha256 is not None:
                raise UserError("duo-attention: gates_sha256 is given, but gates names none. Leave it out.")
            return
        _, found = read_gates(self.gates)
        if self.gates_sha256 not in (None, found):
            raise UserError(
                f"duo-attention: gates file '{self.gates}' is not the one asked for: its sha256 is {found}, not "
                f"{self.gates_sha256}. Leave gates_sha256 out to use this file."
            )
        object.__setattr__(self, "gates_sha256", found)

    def minimum_entries(self) -> int:
        """Two entries per KV head."""
        return 2

    def rank(self, model: Model) -> tuple[Head, ...]:
        """Heads by descending gate, or by induction score without gates (`UserError` for gates of another model)."""
        if self.gates is None:
            return by_score(find_profile(model, self.probe).induction)
        gates, _ = read_gates(self.gates)
        wanted = [x.kv_heads for x in model.layers]
        if [len(x) for x in gates] != wanted:
            raise UserError(
                f"duo-attention: gates file '{self.gates}' has {_size(len(gates), [len(x) for x in gates])}, and "
                f"{model.id} has {_size(len(wanted), wanted)}: it was made for another model. Use this model's gates, "
                "or leave gates out for a head profile."
            )
        return by_score(gates)

    def most_retrieval(self, heads: int) -> int:
        """All heads: the budget decides how many stream."""
        return heads

    def least_window(self, entries: int) -> int:
        """Sinks and recent entries, or a share of the mean entries per head if that is less."""
        return max(1, min(self.sinks + self.recent, entries // LEAST_SHARE))

    def paper(self, heads: int, length: int) -> tuple[int, int]:
        """The number of gates at or above the quantile `sparsity`, and `sinks` plus `recent`."""
        return heads - math.ceil(self.sparsity * (heads - 1) if self.sparsity < 1 else heads), self.sinks + self.recent

    def sinks_in(self, entries: int) -> int:
        """Sinks among this many entries: proportionally fewer if there are fewer than `sinks` plus `recent`."""
        return min(self.sinks, self.sinks * entries // (self.sinks + self.recent))


def read_gates(path: str) -> tuple[Scores, str]:
    """The gates of a file, by layer and KV head, from 0 to 1, and the file's sha256.

    Raises:
        UserError: the file cannot be read, or is not a table of finite numbers.
    """
    try:
        data = Path(path).read_bytes()
        gates = [[float(x) for x in line.split("\t")] for line in data.decode("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"duo-attention: gates file '{path}' cannot be read: {error.strerror}. {HINT}") from error
    except ValueError as error:
        raise UserError(f"duo-attention: gates file '{path}' is not a table of numbers: {error}. {HINT}") from error
    if not gates or not all(math.isfinite(x) for layer in gates for x in layer):
        raise UserError(f"duo-attention: gates file '{path}' has no gates, or some that are not finite. {HINT}")
    return tuple(tuple(min(1.0, max(0.0, x)) for x in layer) for layer in gates), hashlib.sha256(data).hexdigest()


def _size(layers: int, heads: list[int]) -> str:
    return f"{layers} layers of {' or '.join(map(str, sorted(set(heads))))} KV heads"
