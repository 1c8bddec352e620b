"""Compares the files of both sides, and writes docs/parity.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import CASES, KVPRESS, MODELS, Case

Arrays = Mapping[str, np.ndarray]
EQUAL = 1e-3
"""Logits that differ by less count as equal: two versions of transformers add in different orders."""
PAGE = Path(__file__).with_name("page.md")
"""The page without its tables."""


@dataclass(frozen=True)
class Row:
    """A comparison on one model."""

    case: Case
    equal_heads: float
    common_entries: float
    logits: float
    effect: float

    @property
    def agrees(self) -> bool:
        """Whether both sides keep the same entries and compute the same logits."""
        return self.equal_heads == 1 and self.logits < EQUAL


def compare(ours: Arrays, theirs: Arrays, prompts: int, cases: Iterable[Case] = CASES) -> list[Row]:
    """A row for every case with a press, over the prompts of a model."""
    rows = []
    for case in cases:
        if case.press is None:
            continue
        equal, common, kept, logits, effect = [], 0, 0, 0.0, 0.0
        for i in range(prompts):
            key = f"{case.name}/{i}"
            mine, other = ours[f"{key}/kept"], theirs[f"{key}/kept"]
            equal.append((mine == other).all(-1).mean())
            common, kept = common + int((mine & other).sum()), kept + int(mine.sum())
            logits = max(logits, find_distance(ours[f"{key}/logits"], theirs[f"{key}/logits"]))
            effect = max(effect, find_distance(theirs[f"full/{i}/logits"], theirs[f"{key}/logits"]))
        rows.append(Row(case, float(np.mean(equal)), common / kept, logits, effect))
    return rows


def find_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference."""
    return float(np.abs(a - b).max())


def write_page(folder: Path, page: Path) -> None:
    """Read both sides' files and write the page."""
    tables, sides = [], []
    for name, plan in MODELS.items():
        ours, theirs = (np.load(folder / f"{name}.{side}.npz") for side in ("ours", "theirs"))
        sides = [json.loads(str(x["facts"])) for x in (ours, theirs)]
        layers, heads, length = ours[f"{CASES[0].name}/0/kept"].shape
        tables.append(
            f"## {name}\n\n{layers} layers of {heads} KV heads; {plan.prompts} contexts of {length} tokens.\n\n"
            f"{write_table(compare(ours, theirs, plan.prompts), sides[0]['methods'])}"
        )
    lines = [", ".join(f"{key} {x}" for key, x in side["versions"].items()) for side in sides]
    page.write_text(PAGE.read_text(encoding="utf-8").format(
        kvpress=KVPRESS, equal=EQUAL, tables="\n\n".join(tables), notes=write_notes(CASES),
        versions="\n".join(f"- {x}" for x in [*lines, f"{sides[0]['machine']}, one thread"]),
    ), encoding="utf-8")


def write_table(rows: list[Row], versions: Mapping[str, str]) -> str:
    """The comparisons of a model in Markdown. versions: of the methods."""
    lines = [
        "| method | version | press | equal | equal heads | common entries | logits | effect |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{x.case.method}` | {versions[x.case.method]} | `{x.case.press}` | {'yes' if x.agrees else 'no'} "
        f"| {share(x.equal_heads)} | {share(x.common_entries)} | {x.logits:.2g} | {x.effect:.2g} |"
        for x in rows
    ]
    return "\n".join(lines)


def share(value: float) -> str:
    """A percentage that is 100 % only where nothing is missing."""
    return "100 %" if value == 1 else f"{min(value, 0.9999):.2%}".replace("%", " %")


def write_notes(cases: Iterable[Case]) -> str:
    """The notes of the cases in Markdown."""
    return "\n".join(
        f"- `{x.method}`{'' if x.press is None else f' and `{x.press}`'}: {x.note}" for x in cases if x.note
    )
