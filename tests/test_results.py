"""The curated results under results/ are whole: read, never made again here."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest

from kvbench.analysis.rescore import rescore
from kvbench.hf.find import find_folder, hash_model
from kvbench.leaderboard.submission.records import MANIFEST, VERIFICATION, Verification
from kvbench.registry import list_models
from kvbench.runs.files import finished_samples, read_file, read_lines
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec

ROOT = Path(__file__).parent.parent / "results"
RUNS = sorted(x.parent for x in ROOT.glob("*/*/result.json") if not (x.parent / MANIFEST).exists())
"""`results/<hardware>/<run>`, without submissions"""


def test_there_are_runs_and_nothing_else():
    """Every folder of results/<hardware> is a finished run or a submission; the next tests look at something."""
    runs = [x for x in ROOT.iterdir() if x.is_dir() and x.name not in ("bench", "gpu")]  # tests/bench reads these two
    folders = [x for hardware in runs for x in hardware.iterdir() if x.is_dir() and not (x / MANIFEST).exists()]
    assert len(RUNS) > 0
    assert sorted(folders) == RUNS


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)], ids=["every 20th", "every"])
def test_a_run_is_whole(step, subtests, tmp_path):
    """Schema; the name is the hash of the spec; every sample is there and scores the same again; nothing was dirty."""
    for folder in RUNS[::step]:
        with subtests.test(run=folder.name):
            check(folder, tmp_path)


def check(folder, scratch):
    """Properties of a run's folder."""
    spec = read_file(folder / "spec.json", RunSpec)
    result = read_file(folder / "result.json", Result)
    assert (result.status, result.error) == ("ok", None)
    assert spec.run_id == folder.name == result.run_id
    assert result.spec == spec
    assert result.environment.git is not None
    assert not result.environment.git.dirty

    lines = read_lines(folder / "samples.jsonl")
    assert finished_samples(lines) == set(range(spec.samples))
    assert len(lines) == spec.samples * spec.turns

    copy = shutil.copytree(folder, scratch / folder.name)
    record, _ = rescore(copy)
    if record.score.interval == result.score.interval:
        assert record.score == result.score
    else:  # results of kvbench 0.1 have another interval of the same mean
        same = {"ci95": result.score.ci95, "interval": result.score.interval}
        assert record.score.model_copy(update=same) == result.score


def test_every_run_is_verified():
    """Otherwise its protocol may have no rank and no line of the full cache on the site."""
    levels = {x.name: read_file(x / VERIFICATION, Verification).level for x in RUNS if (x / VERIFICATION).is_file()}
    assert [x.name for x in RUNS if levels.get(x.name) is None] == []


def test_weights_are_those_of_one_model():
    """Results in one folder were made with the same weights; those of a bundled model are the ones that ship."""
    bundled = set()
    for folder in {x.parent for x in RUNS}:
        models = {read_file(x / "spec.json", RunSpec).model for x in RUNS if x.parent == folder}
        assert len(models) == 1, (folder, models)
        model = models.pop()
        if model.id in list_models():
            bundled.add(model.id)
            assert hash_model(model.id, find_folder(model.id)) == model.sha256, folder
    assert bundled == set(list_models())


def test_a_changed_prediction_is_found(tmp_path):
    """The check can fail: a score that does not follow from the predictions does not come out again."""
    folder = next(x for x in RUNS if read_file(x / "result.json", Result).score.mean)
    copy = shutil.copytree(folder, tmp_path / folder.name)
    before = gzip.decompress((copy / "samples.jsonl.gz").read_bytes()).decode()
    text = re.sub(r'"prediction":"[^"]*"', '"prediction":"?"', before, count=10)
    assert text != before
    (copy / "samples.jsonl").write_text(text)  # read in the place of the packed one
    record, _ = rescore(copy)
    assert record.score != read_file(folder / "result.json", Result).score
