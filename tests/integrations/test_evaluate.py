"""Scorers as metrics of `evaluate`: found by id, equal to the scorer, and without a network."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench.integrations.evaluate import load_metric
from kvbench.registry import list_entries

TOYS = """
from kvbench.task import Scorer, Task


class Toy(Task):
    name = "toy-of-metrics"
    scorers = (
        Scorer("toy-half@1", "half", lambda prediction, references: 0.5),
        Scorer("toy-part@1", "part", lambda p, r, *, own: float(p == r[0]) if own else None, facts=("own",)),
    )
    prompt_id = "none"

    def minimum_length(self, turns, tokenizer):
        return 0
"""


@pytest.fixture
def toys(monkeypatch, tmp_path):
    """A task of another package, with a scorer that asks for a fact; and one that cannot be imported."""
    (tmp_path / "metric_toys.py").write_text(TOYS)
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        importlib.metadata.EntryPoint(name, value, "kvbench.tasks")
        for name, value in {"toy-of-metrics": "metric_toys:Toy", "lost": "nothing_of_this_name:X"}.items()
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [x for x in points if x.group == group])
    monkeypatch.setattr("kvbench.registry.list_entries", list_entries.__wrapped__)  # without its cache


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Where evaluate would keep its files."""
    import evaluate  # takes a second, which collecting need not

    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_scorer_of_ours_is_a_metric():
    """RULER's string match: all of 1 reference, and 1 of 2."""
    from evaluate import Metric

    metric = load_metric("ruler-string-match-all@1")
    assert isinstance(metric, Metric)
    found = metric.compute(predictions=["it is 12", "1 and 2"], references=[["12"], ["1", "3"]])
    assert found == {"string_match_all": 0.75, "n": 2}


def test_predictions_may_be_added_one_by_one():
    """The interface of `evaluate`, and a metric that can be used again."""
    metric = load_metric("scbench-kv@1")
    for prediction in ("a", "b", "ab"):
        metric.add(prediction=prediction, reference=["a"])
    assert metric.compute() == {"contains": pytest.approx(2 / 3), "n": 3}
    assert metric.compute(predictions=["b"], references=[["a"]]) == {"contains": 0.0, "n": 1}


def test_turns_that_are_not_the_scorers_are_left_out(toys):
    """The mean is over those that are, and n says how many."""
    found = load_metric("toy-part@1").compute(
        predictions=["a", "b", "c"], references=[["a"]] * 3, facts=[{"own": True}, {"own": True}, {"own": False}]
    )
    assert found == {"part": 0.5, "n": 2}


def test_a_mean_of_nothing_is_refused(toys):
    """It is no score."""
    with pytest.raises(UserError, match="toy-part@1 applies to none of 1 predictions"):
        load_metric("toy-part@1").compute(predictions=["a"], references=[["a"]], facts=[{"own": False}])


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, r"needs the facts own, and prediction 0 has no own\. Give facts="),
        ({"facts": [{"own": True}, {"other": True}]}, "needs the facts own, and prediction 1 has no own"),
        ({"facts": [{"own": True}]}, "1 facts for 2 predictions"),
    ],
)
def test_missing_facts_are_named(toys, facts, message):
    """With the prediction that lacks them."""
    with pytest.raises(UserError, match=message):
        load_metric("toy-part@1").compute(predictions=["a", "b"], references=[["a"], ["b"]], **facts)


@pytest.mark.parametrize("scorer", ["ruler-string-match-all@1", "ruler-string-match-part@1"])
def test_a_prediction_without_references_is_refused(scorer):
    """Nothing could be right, so 0 would be no score of the prediction."""
    with pytest.raises(UserError, match="prediction 1 has no reference"):
        load_metric(scorer).compute(predictions=["a", "b"], references=[["a"], []])


def test_an_unknown_scorer_is_named(toys):
    """With the nearest, and the tasks that could not be searched; they harm nobody else."""
    with pytest.raises(UserError) as error:
        load_metric("toy-halve@1")
    assert "unknown scorer 'toy-halve@1'. Did you mean 'toy-half@1'?" in str(error.value)
    assert "Not searched: task 'lost' cannot be imported: ModuleNotFoundError" in str(error.value)
    assert load_metric("toy-half@1").compute(predictions=["a"], references=[["a"]]) == {"half": 0.5, "n": 1}


def test_evaluate_is_an_extra(monkeypatch):
    """Without it the message says how to install it."""
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(UserError, match=r"load_metric needs the package evaluate .* pip install 'kvbench\[data\]'"):
        load_metric("scbench-kv@1")


def test_nothing_is_written(cache, monkeypatch, tmp_path):
    """But empty folders in evaluate's own cache."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    load_metric("scbench-kv@1").compute(predictions=["a"], references=[["a"]])
    assert list(work.iterdir()) == []
    assert [x for x in cache.rglob("*") if x.is_file()] == []


@pytest.mark.slow
def test_no_network_is_asked(tmp_path):
    """In a fresh process that may not connect, and that was not told to stay offline."""
    code = (
        "import socket\n"
        "def refuse(*_): raise SystemExit('a connection was tried')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from kvbench.integrations.evaluate import load_metric\n"
        "print(load_metric('scbench-kv@1').compute(predictions=['a'], references=[['a']]))"
    )
    environment = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "{'contains': 1.0, 'n': 1}\n", done.stderr
