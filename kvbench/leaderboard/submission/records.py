"""The records of a submission: manifest.json, written by the submitter, and verification.json, written by the verifier.

A bundle is a folder, or a plain tar, of spec.json, samples.jsonl.gz, result.json and manifest.json, and of method.py if
the method is the submitter's own.
verification.json is not part of a bundle. It deserves as much trust as the verifier who wrote it (`seal.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from kvbench.runs.results import Score
from kvbench.runs.schema import SCHEMA_VERSION
from kvbench.runs.spec import Record

MANIFEST, VERIFICATION = "manifest.json", "verification.json"
BUNDLED = SPEC, SAMPLES, RESULT = "spec.json", "samples.jsonl.gz", "result.json"
"""The files that every manifest lists."""
METHOD = "method.py"
"""The source of a method that kvbench does not have, under this name; it is shown and never run."""
Level = Literal["L0", "L1", "L2", "L3"]
LEVELS: dict[Level, str] = {
    "L0": "answers rescored on regenerated prompts",
    "L1": "a random share of its samples rerun",
    "L2": "all of its samples rerun",
    "L3": "all of its samples rerun, and new examples run under a secret seed",
}
"""Meaning of each level, as badges show it; each includes those above it in this list."""
Outcome = Literal["ok", "flag", "refused"]


def _check_branch(name: str) -> str:
    """Refuse names that git refuses: a submission's branch begins with its submitter."""
    if ".." in name or name.endswith(".lock"):
        raise ValueError("git takes no branch with '..' or '.lock' at the end of its name")
    return name


Handle = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$"), AfterValidator(_check_branch)
]
"""ASCII only, so that no letter of another alphabet can stand in for one."""
HANDLE_RULE = (
    "A submitter consists of at most 64 ASCII letters, digits, '.', '_' and '-', begins and ends with a letter or a "
    "digit, and has no '..' and no '.lock' at the end, which git refuses."
)
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Choice = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+:/-]{0,99}$")]
"""`TASK`, `TASK:dev` or `TASK:test`."""
Link = Annotated[str, StringConstraints(
    max_length=200, pattern=r"^https://(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63}(?:/[A-Za-z0-9._~/?#=&%+:,@-]*)?$",
)]
"""An https address with a host name, without user name, port or characters that HTML or a terminal interprets."""


class BundledFile(Record):
    """One file of a bundle."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    """In bytes."""


class Manifest(Record):
    """manifest.json: the content of a submission and its submitter."""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    submitter: Handle
    tuned_on: Annotated[tuple[Choice, ...], Field(max_length=64)]
    """Data on which the settings were chosen; empty if nothing was tuned."""
    code_url: Link | None = None
    """Code of the method, as the submitter states."""
    paper_url: Link | None = None
    """Paper of the method, as the submitter states."""
    created: str
    kvbench: str
    """Version that packed the bundle."""
    source: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,100}\.py$")] | None = None
    """The original name of method.py; None: the method is kvbench's."""
    files: dict[str, BundledFile]
    """By name: the files in BUNDLED, and METHOD if `source` names it."""

    @property
    def content(self) -> str:
        """`hash_content` of the files: equal for equal runs, independent of submitter and time."""
        return hash_content(self.files)

    @property
    def identity(self) -> str:
        """Hash of content, submitter, tuning data and links: a bundle that is sent again has the same one."""
        links = "".join(f" {name} {url}" for name, url in self.links)
        stated = f"{self.content} {self.submitter} {' '.join(sorted(set(self.tuned_on)))}{links}"
        return hashlib.sha256(stated.encode()).hexdigest()[:24]


    @property
    def links(self) -> list[tuple[str, str]]:
        """The submitter's links, with the word that pages show for each."""
        return [(name, url) for name, url in (("code", self.code_url), ("paper", self.paper_url)) if url is not None]

    @property
    def stated(self) -> str:
        """Tuning data and links, in words."""
        links = "".join(f", {name} at {url}" for name, url in self.links)
        return f"settings tuned on {', '.join(self.tuned_on) or 'nothing'}{links}"


def hash_content(files: Mapping[str, BundledFile]) -> str:
    """SHA-256 over the names and hashes of files."""
    lines = "".join(f"{files[name].sha256} {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


class Check(Record):
    """The outcome of one check."""

    name: str
    """One word, for example `prompts`."""
    outcome: Outcome
    """`flag`: shown next to the row; `refused`: not listed."""
    reason: str
    """One line of plain text."""


class OtherScore(Record):
    """The rerun's score of an answer that has another one in the submission."""

    index: int
    """Of the sample."""
    turn: int
    score: float | None


class RerunResult(Record):
    """Comparison of submitted samples with a rerun by the verifier."""

    share: float
    """Share of the run's samples, above 0 and at most 1."""
    seed: int
    """Seed of the draw."""
    samples: int
    answers: int
    same_answers: int
    """Answers that are equal in every token."""
    tokens: int
    """Generated tokens, counting the longer answer of each pair."""
    same_tokens: int
    """Tokens that are equal at the same position."""
    submitted_mean: float | None
    """Mean submitted score of these samples."""
    mean: float | None
    other_scores: tuple[OtherScore, ...] = ()
    """These replace the submitted scores in every comparison."""
    differs: tuple[str, ...]
    """Fields of the spec that differ in the rerun: versions, sources, device."""
    cpu: str
    gpu: str | None


class FreshSeedResult(Record):
    """Comparison of the submitted mean with a run of the same spec on new examples under a secret seed."""

    samples: int
    submitted_mean: float
    submitted_ci95: tuple[float, float] | None
    mean: float
    ci95: tuple[float, float] | None
    p_value: float
    """One-sided permutation test: probability of a fresh mean this much worse by chance."""


class Verification(Record):
    """verification.json: the checks of one bundle."""

    schema_version: Literal[2] = SCHEMA_VERSION
    run_id: str
    content: str
    """Manifest.content of the verified files; the record does not apply to any others."""
    submitter: str | None
    """None: a run without a manifest."""
    manifest: str | None = None
    """SHA-256 of manifest.json, so that the record applies to no other submitter, tuning data or links; None: a run
    without a manifest."""
    level: Level | None
    """Highest level reached; None: not even L0, see the checks."""
    checks: tuple[Check, ...]
    score: Score | None
    """Recomputed by the verifier from the answers; None if that was not possible."""
    rerun: RerunResult | None = None
    hidden: FreshSeedResult | None = None
    kvbench: str
    """Version of the verifier."""
    commit: str | None
    """Commit of the verifier; ends in `-dirty` if its tree was changed."""
    created: str
    seal: str | None = None
    """Shows that the verifier of this machine wrote it; None: not sealed."""

    @property
    def refused(self) -> bool:
        """Whether any check refused it, so that it is not listed."""
        return any(x.outcome == "refused" for x in self.checks)
