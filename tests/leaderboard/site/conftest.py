"""Fixtures: small results folders, made by editing a curated run."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvbench.leaderboard.site.build import Built, build_site
from kvbench.leaderboard.submission.archive import read_files
from kvbench.leaderboard.submission.bundle import open_head, pack_run
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import VERIFICATION, Check, Level, Verification
from kvbench.leaderboard.submission.seal import seal
from kvbench.registry import list_entries
from kvbench.runs.schema import upgrade
from kvbench.runs.spec import RunSpec

CURATED = Path(__file__).parents[3] / "results" / "cpu-2-cores"


def find_template(budget: str, visibility: str, length: int) -> tuple[Path, dict[str, Any]]:
    """Find the curated run of kvbench 0.1 with these options, and its result."""
    for folder in CURATED.glob("expected-attention-niah_*"):
        result: dict[str, Any] = upgrade(json.loads((folder / "result.json").read_text()))
        if (result["budget"]["asked"], result["visibility"], result["task"]["length"]) == (budget, visibility, length):
            return folder, result
    raise LookupError(f"no curated run of expected-attention at {budget}, {visibility}, {length:,} tokens")


MODEL, RESULT = find_template("10%", "first-turn", 2048)
LINE: dict[str, Any] = upgrade(json.loads(gzip.decompress((MODEL / "samples.jsonl.gz").read_bytes()).splitlines()[0]))
METHODS = {x.name for x in list_entries("method")}
Scores = Sequence[Sequence[float]]
SCORES: dict[str, Scores] = {"good": [[1.0, 1.0]] * 12, "poor": [[1.0, 0.0]] * 12, "bad": [[0.0, 0.0]] * 12}
"""Scores by context and turn."""


class Results:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True)

    def add(
        self, place: str, scores: str | Scores = "poor", *, method: str = "snapkv", stored: float = 0.25,
        kind: str = "stored", edit: Callable[[dict[str, Any], list[dict[str, Any]]], None] | None = None,
        verified: bool = True,
    ) -> Path:
        """Add a run of this method with these scores by context and turn; `edit` changes its result and lines."""
        result = copy.deepcopy(RESULT)
        spec = result["spec"]
        scores = SCORES[scores] if isinstance(scores, str) else scores
        values = [x for context in scores for x in context]
        for part in (spec["method"], result["method"], result["method"]["card"]):
            part["name"] = method
        result["method"]["settings"] = {} if method == "full" else {"window": 32, "kernel": 7, "pool": "max"}
        spec |= {"samples": len(scores), "turns": len(scores[0])}
        result |= {"n_samples": len(scores), "n_scored": len(scores), "n_questions": len(values)}
        result["visibility"] = "first-turn"
        result["score"] |= {
            "mean": fmean(values), "partial_mean": fmean(values), "ci95": [min(values), max(values)],
            "by_turn": [{"mean": fmean(x), "n": len(x)} for x in zip(*scores, strict=True)],
        }
        result["budget"]["kind"] = result["method"]["card"]["budget"] = kind
        full = result["memory"]["full_bytes"]
        result["memory"] |= {
            "stored_bytes": round(stored * full), "ratio": stored, "ratio_total": stored,
            "read_bytes_per_step": full // 5, "full_read_bytes_per_step": full,
        }
        if kind == "none":
            result["effect"] |= {"n": 0, "n_acted": 0}
            result["budget"]["asked"] = spec["budget"] = None
        lines = [
            copy.deepcopy(LINE) | {
                "sample": f"test-0-{i}", "index": i, "turn": turn, "turns": len(context), "prompt_hash": f"{i:016x}",
                "score": score,
            }
            for i, context in enumerate(scores) for turn, score in enumerate(context)
        ]
        if edit is not None:
            edit(result, lines)
        for part in ("method", "task", "model"):
            spec[part] = {key: result[part][key] for key in spec[part]}
        spec |= {key: result[key] for key in ("mode", "visibility", "history")}
        result["run_id"] = RunSpec.model_validate(spec).run_id
        folder = self.folder / place
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "samples.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
        if verified:
            with suppress(RefusedError):
                self.verify(folder, "L0")
        return folder

    def send(self, folder: Path, submitter: str, **links: str) -> None:
        """Turn a run into a submission. links: `code_url` and `paper_url`."""
        files = pack_run(folder, submitter, ("niah:dev",), **links)
        for path in folder.iterdir():
            path.unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def verify(
        self, folder: Path, level: Level | None, *checks: Check, content: str | None = None,
        interval: tuple[float, float] | None = None, passed: tuple[str, ...] | None = None,
    ) -> None:
        """Write a verification.json, optionally with its own interval."""
        head = open_head(read_files(folder))
        renewed = {"ci95": interval, "interval": "exact"}
        score = None if interval is None else head.result.score.model_copy(update=renewed)
        if level is not None:
            if passed is None:
                passed = ("bytes", "method") if head.spec.method.name in METHODS else ("bytes",)
            checks = (*(Check(name=x, outcome="ok", reason="") for x in passed), *checks)
        record = Verification(
            run_id=head.spec.run_id, content=content or head.content, submitter=head.submitter,
            manifest=head.manifest_sha256, level=level, checks=checks, score=score, kvbench="0.1.0", commit=None,
            created="2026-11-21T00:00:00+00:00",
        )
        (folder / VERIFICATION).write_text(seal(record).model_dump_json())

    def build(self) -> Built:
        """Build the site next to the folder."""
        return build_site(self.folder, self.folder.with_name("site"))


@pytest.fixture
def make_results(tmp_path: Path) -> Callable[[str], Results]:
    """Makes empty results folders by name."""
    def make(name: str) -> Results:
        return Results(tmp_path / name / "results")

    return make


@pytest.fixture
def results(make_results: Callable[[str], Results]) -> Results:
    """An empty results folder."""
    return make_results("one")
