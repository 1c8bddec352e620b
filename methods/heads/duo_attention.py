"""DuoAttention: retrieval heads keep every entry, streaming heads sinks and a sliding window."""

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

HINT = "Give a full_attention_heads.tsv as the authors publish it: a line per layer, numbers per KV head, tabs between."


@dataclass(frozen=True)
class DuoAttention(HeadMethod):
    """Heads with large gates keep every entry; the others `sinks` first entries and a window of recent ones."""

    sinks: Natural = 64
    recent: Positive = 256
    sparsity: Share = 0.5
    """Share of the heads that stream under `--budget paper`."""
    gates: str | None = None
    """Trained gates: the path of the authors' `full_attention_heads.tsv`. None: the head profile stands in."""
    gates_sha256: str | None = None
    """Of that file; found by itself, and refused if it is another."""

    card: ClassVar[Card] = Card(
        name="duo-attention",
        title="DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
        idea="A gate per KV head is trained to tell which heads need the whole context. "
        "Those keep every entry; the others stream, with sinks and a window of constant size.",
        arxiv="2410.10819",
        year=2024,
        family="heads",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="the share `sparsity` of the heads holds `sinks` and `recent` entries, the others every entry",
        heads="indexed",
        upstream=Upstream(repo="mit-han-lab/duo-attention", commit="03dca842639c64ed0d0daf9042da845cdea44637",
                          license="MIT"),
        deviations=(
            ("Without a file of gates, heads are ranked by the induction score of a head profile: a stand-in that is "
            "measured in seconds, no gate trained on passkeys."),
            ("A budget is the paper's only as --budget paper. Another is spent on as many retrieval heads as leave the "
            "others `sinks` and `recent` rows, or a fifth of the mean rows per head where that is less; the rest of "
            "it widens their windows. Narrower windows have fewer sinks in proportion."),
            "The prompt is run with full attention for all heads; the authors stream it in chunks.",
            ("A window slides after every forward of a question as a whole, so that chunks do not matter."),
            "Heads are not permuted in the weights: their entries lie in two stores, and outputs are put in order.",
            "Equal gates are ordered by layer and head; the authors add noise.",
        ),
        limits=(
            "The middle of the text is gone for streaming heads.",
            ("A model that does not copy random tokens, as the bundled one does not, shows no retrieval heads to the "
            "probe: its ranking is noise there."),
            "A file of gates names no model: one with the right number of layers and heads is believed.",
            ("Sliding layers whose window is shorter than the context stream recent entries only: the first tokens are "
            "outside. Those with a longer window keep sinks, which go out of sight once the conversation outgrows it."),
        ),
    )

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, and a file of gates that is none."""
        super().__post_init__()
        if self.gates is None:
            if self.gates_sha256 is not None:
                raise UserError("duo-attention: gates_sha256 is of a file, and gates names none. Leave it out.")
            return
        _, found = read_gates(self.gates)
        if self.gates_sha256 not in (None, found):
            raise UserError(
                f"duo-attention: gates file '{self.gates}' is not the one asked for: its sha256 is {found}, not "
                f"{self.gates_sha256}. Leave gates_sha256 out to take it."
            )
        object.__setattr__(self, "gates_sha256", found)

    def minimum_entries(self) -> int:
        """A recent entry, and one to choose."""
        return 2

    def rank(self, model: Model) -> tuple[Head, ...]:
        """Heads by their gates."""
        if self.gates is None:
            return by_score(find_profile(model, self.probe).induction)
        gates, _ = read_gates(self.gates)
        wanted = [x.kv_heads for x in model.layers]
        if [len(x) for x in gates] != wanted:
            raise UserError(
                f"duo-attention: gates file '{self.gates}' has {_size(len(gates), [len(x) for x in gates])}, and "
                f"{model.id} has {_size(len(wanted), wanted)}: it was made for another model. Give this model's, or "
                "leave gates out for a head profile."
            )
        return by_score(gates)

    def most_retrieval(self, heads: int) -> int:
        """All: how many stream is what a budget decides."""
        return heads

    def least_window(self, rows: int) -> int:
        """Sinks and recent entries, or a share of the mean entries per head where that is less."""
        return max(1, min(self.sinks + self.recent, rows // LEAST_SHARE))

    def paper(self, heads: int, length: int) -> tuple[int, int]:
        """The gates at or above the quantile `sparsity`, and the settings' window."""
        return heads - math.ceil(self.sparsity * (heads - 1) if self.sparsity < 1 else heads), self.sinks + self.recent

    def sinks_in(self, rows: int) -> int:
        """First entries among so many: fewer in proportion where the window is narrower than the settings'."""
        return min(self.sinks, self.sinks * rows // (self.sinks + self.recent))


def read_gates(path: str) -> tuple[Scores, str]:
    """The gates of a file, by layer and KV head, from 0 to 1, and the file's sha256.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        data = Path(path).read_bytes()
        rows = [[float(x) for x in line.split("\t")] for line in data.decode("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"duo-attention: gates file '{path}' cannot be read: {error.strerror}. {HINT}") from error
    except ValueError as error:
        raise UserError(f"duo-attention: gates file '{path}' is no table of numbers: {error}. {HINT}") from error
    if not rows or not all(math.isfinite(x) for row in rows for x in row):
        raise UserError(f"duo-attention: gates file '{path}' has no gates, or some that are not finite. {HINT}")
    return tuple(tuple(min(1.0, max(0.0, x)) for x in row) for row in rows), hashlib.sha256(data).hexdigest()


def _size(layers: int, heads: list[int]) -> str:
    return f"{layers} layers of {' or '.join(map(str, sorted(set(heads))))} KV heads"
