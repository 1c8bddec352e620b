"""Writes docs/methods.md from the cards of all methods: `python scripts/show_methods.py`."""

from __future__ import annotations

from pages import DOCS, take_no_arguments

from kvbench.method import Card, name_preparation
from kvbench.registry import find_method, list_entries

PAGE = DOCS / "methods.md"
FAMILIES = {
    "baseline": ("Baseline", "The full cache, with which every method is compared."),
    "eviction": ("Eviction", "Entries are removed, and later tokens do not see them."),
    "allocation": ("Allocation", "A budget is divided unequally over heads or layers."),
    "heads": ("Heads", "A few heads keep every entry; the others keep sinks and recent entries."),
    "merging": ("Merging", "Entries that are removed are averaged into others."),
    "quantization": ("Quantization", "Every entry is kept with fewer bits, in fewer dimensions, or entropy coded."),
    "channels": ("Channels", "Every entry is kept, without a part of its channels or elements."),
    "retrieval": (
        "Retrieval",
        ("Entries are stored on the device, on the host or in a file, and a token reads a part of them. `mpcache`, "
        "`rocketkv` and `sentencekv` drop some entries of the context first."),
    ),
    "prefill": ("Sparse prefill", "A part of the prompt's attention is computed; the cache is the full one."),
    "lossless": (
        "Lossless decoding",
        "A small cache or model drafts tokens and the full cache verifies them: the output is that of greedy decoding.",
    ),
    "reuse": (
        "Reuse across prompts",
        ("Entries of documents that occurred in earlier prompts are taken over. `no-context` never sees the documents, "
        "and `reasoncache` stores a trained prefix in place of demonstrations."),
    ),
    "diffusion": ("Diffusion models", "Policies that compute a part of the positions in each denoising step."),
}
"""Heading and description of each family, in the order of the page."""
HEAD = """# Methods

This page lists every method with its paper and its idea; `scripts/show_methods.py` writes it from the methods' cards.
`kvbench show NAME` prints the whole card: settings, what is stored, deviations from the paper, guesses and limits.

The budget column says what `--budget` limits: the *stored* entries, or those *read* by a decode step.
With *bits* and *prompt* the settings determine the size, or the part of the prompt's attention; *none* takes no budget.
*Calibrated* methods measure something on the model before a run, in passes over Python's manual or random tokens.
*Trained* methods fit parameters: `dms` and `kvzap` on that manual, which is no task's text, when a run starts, and \
the others on the tasks' train split, so that their runs have no rank ([leaderboard](leaderboard.md)).

Two papers have no method of their own:

- [Tutti](https://arxiv.org/abs/2605.03375) places KV entries on disk. With `tier=file`, the methods of Retrieval that \
have the setting `tier` keep the context in a file per layer, read the chosen entries from it in each step, and count \
bytes by tier; `Session.save` and `Session.load` keep a whole cache in a file, bit for bit. Not implemented: reads \
that the GPU issues, objects that scatter and gather, and loading a layer while another one computes. A step waits for \
its reads, so its time is no estimate of Tutti's.
- [Sequential KV](https://arxiv.org/abs/2604.15356) gives bounds and has no experiments; `kvbench trace` draws them as \
two lines ([traces](trace.md)).
"""


def write_row(card: Card) -> str:
    """A method's row of the table."""
    name = f"[`{card.name}`](https://arxiv.org/abs/{card.arxiv})" if card.arxiv else f"`{card.name}`"
    budget = ", ".join(filter(None, (card.budget.value, name_preparation(card.calibration))))
    return f"| {name} | {card.year or '-'} | {budget} | {card.idea} |"


def write_page() -> str:
    """The whole page."""
    cards = [find_method(x.name).card for x in list_entries("method")]
    assert {x.family for x in cards} == set(FAMILIES)
    lines = [HEAD]
    for family, (title, text) in FAMILIES.items():
        lines += [f"## {title}", "", text, "", "| method | year | budget | idea |", "| --- | --- | --- | --- |"]
        lines += [*(write_row(x) for x in cards if x.family == family), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    take_no_arguments(__doc__)
    PAGE.write_text(write_page(), encoding="utf-8")
