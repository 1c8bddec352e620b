"""The files that stand beside a run on the leaderboard: manifest.json, by who submits, and verification.json.

A bundle is a folder, or a plain tar, of spec.json, samples.jsonl.gz, result.json and manifest.json.
verification.json is written by who verifies, never by who submits: it is no part of a bundle, and is believed as far
as its writer is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kvbench.runs.results import Score
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record

MANIFEST, VERIFICATION = "manifest.json", "verification.json"
BUNDLED = SPEC, SAMPLES, RESULT = "spec.json", "samples.jsonl.gz", "result.json"
"""The files that a manifest names."""
Level = Literal["L0", "L1", "L2", "L3"]
LEVELS: dict[Level, str] = {
    "L0": "scored again from its samples, on prompts made again",
    "L1": "a random share of its samples run again",
    "L2": "all of its samples run again",
    "L3": "run afresh under a seed that only the verifier knows",
}
"""What each level says, in the words of a badge."""
Outcome = Literal["ok", "flag", "refused"]
Handle = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$")]
"""Plain letters only, so that no name can be written to look like another."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Choice = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+:/-]{0,99}$")]
"""`TASK`, `TASK:dev` or `TASK:test`."""


class FileEntry(Record):
    """One file of a bundle."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    """In bytes, as it lies there."""


class Manifest(Record):
    """manifest.json: what was sent, and by whom."""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    submitter: Handle
    tuned_on: Annotated[tuple[Choice, ...], Field(max_length=64)]
    """What the settings were chosen on; empty: nothing was tuned."""
    created: str
    kvbench: str
    """The version that made the bundle."""
    files: dict[str, FileEntry]
    """By name; all of BUNDLED and no other."""

    @property
    def content(self) -> str:
        """`hash_content` of the files: equal for equal runs, whoever sends them and when."""
        return hash_content(self.files)

    @property
    def identity(self) -> str:
        """Equal where the same is said of the same run by the same submitter: sent again, it is nothing new."""
        said = f"{self.content} {self.submitter} {' '.join(sorted(set(self.tuned_on)))}"
        return hashlib.sha256(said.encode()).hexdigest()[:24]


def hash_content(files: Mapping[str, FileEntry]) -> str:
    """sha256 over the names and hashes of files."""
    lines = "".join(f"{files[name].sha256} {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


class Check(Record):
    """One thing that was looked at."""

    name: str
    """One word, e.g. `prompts`."""
    outcome: Outcome
    """`flag`: shown with the row; `refused`: no row."""
    reason: str
    """One line of plain text; of what is ok, what was seen."""


class Rerun(Record):
    """The same samples under the verifier's hands."""

    share: float
    """Of the run's samples, above 0 to 1."""
    seed: int
    """That drew them."""
    samples: int
    answers: int
    same_answers: int
    """Equal in every token."""
    tokens: int
    """Generated, of the longer of both answers each."""
    same_tokens: int
    """Equal to the submitted token at the same place."""
    submitted_mean: float | None
    """Over these samples, by the run's scorer."""
    mean: float | None
    differs: tuple[str, ...]
    """What of the spec is not what the run had: versions, sources, the device."""
    cpu: str
    gpu: str | None


class HiddenSeed(Record):
    """The same spec on examples that nobody but the verifier has seen."""

    samples: int
    submitted_mean: float
    submitted_ci95: tuple[float, float]
    mean: float
    ci95: tuple[float, float]
    p_value: float
    """How often chance alone makes the fresh mean as much worse as it is."""


class Verification(Record):
    """verification.json: what was found of one bundle."""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    content: str
    """Manifest.content of what was looked at: of other files, this record says nothing."""
    submitter: str | None
    """None: no manifest, a curated run."""
    level: Level | None
    """The highest that was reached; None: not even L0, see the checks."""
    checks: tuple[Check, ...]
    score: Score | None
    """Made again from the samples by the verifier's scorer; None where that was not possible."""
    rerun: Rerun | None = None
    hidden: HiddenSeed | None = None
    kvbench: str
    """The verifier's version."""
    commit: str | None
    """The verifier's, `-dirty` behind it where its tree was."""
    created: str

    @property
    def refused(self) -> bool:
        """Whether there is no row of it."""
        return any(x.outcome == "refused" for x in self.checks)
