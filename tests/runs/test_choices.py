"""Choices are compared by log-probability, scorers apply to their own turns, and both can be rescored."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from kvbench.engine.agreement import FullCache, compare_logits
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.registry import find_task
from kvbench.runs import reply
from kvbench.runs.files import read_lines
from kvbench.runs.job import find_capacity
from kvbench.runs.journal import Agreement, AgreementPart, Line
from kvbench.runs.summary import _agreement
from kvbench.task import Encoded, EncodedTurn, Mode, Split, encode

TOYS = Path(__file__).parents[1] / "toys" / "choices.py"
LAST = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Last"
EQUAL = [" sky", " elm", " cow", " ink"]
"""Choices of equal length, so that the most likely one is not always the shortest."""
REFERENCE, OWN = ("--mode", "multi-turn"), ("--mode", "multi-turn", "--history", "own")
MODES = {
    "visible": (), "hidden": ("--visibility", "hidden", "--chunk", "7"), "reference": REFERENCE, "own": OWN,
    "requests": ("--mode", "multi-request"),
}


@pytest.fixture
def toys(kvbench, arguments, tmp_path):
    """Runs a toy task; the answer, and the lines of the newest run."""

    def run(name, *more, method="full", choices=None):
        command = [*arguments, "--method", method, *more]
        command[command.index("--task") + 1] = f"{TOYS}:{name}"
        if choices is not None:
            command += ["--task-set", f"choices={json.dumps(choices)}"]
        answer = kvbench(*command)
        folder = max((tmp_path / "runs").glob("*"), key=lambda x: x.stat().st_mtime_ns, default=None)
        lines = [] if folder is None else sorted(read_lines(folder / "samples.jsonl"), key=lambda x: (x.index, x.turn))
        return answer, lines, folder

    return run


@pytest.fixture
def plain(model_folder):
    """Log-probabilities of a continuation, by transformers' model in one pass."""
    model = LlamaForCausalLM.from_pretrained(model_folder).eval()

    def weigh(before, tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *tokens]])).logits[0].log_softmax(-1)
        return [logits[len(before) - 1 + i, token].item() for i, token in enumerate(tokens)]

    return weigh


def encoded_examples(model_folder, turns, **settings):
    """The examples of the runs below."""
    task, tokenizer = find_task(f"{TOYS}:Mixed")(**settings), AutoTokenizer.from_pretrained(model_folder)
    asked = {"seed": 0, "split": Split.TEST, "n": 4, "length": 60, "turns": turns, "mode": Mode.SINGLE}
    return [encode(task, x, tokenizer) for x in task.examples(**asked, tokenizer=tokenizer)]


def before(encoded, turn, name, lines):
    """All ids before the answer of a turn."""
    if name not in ("reference", "own"):
        return encoded.context + encoded.turns[turn].first
    ids = encoded.context
    for i, (asked, line) in enumerate(zip(encoded.turns, lines, strict=True)):
        ids += asked.later if i else asked.first
        if i == turn:
            break
        said = line.ids[:-1] if line.stop_reason == "stop" else line.ids
        ids += said if name == "own" else asked.answer
    return ids


@pytest.mark.few
@pytest.mark.parametrize("method", [("full",), (LAST, "--budget", "100%")], ids=["full", "compared"])
@pytest.mark.parametrize("name", MODES)
def test_the_choice_with_the_greatest_log_probability_wins(toys, plain, model_folder, name, method):
    """The log-probabilities in the journal are those of a plain forward pass, whatever came before, token by token."""
    answer, lines, _ = toys("Mixed", *method[1:], *MODES[name], method=method[0], choices=EQUAL)
    assert answer.code == 0, answer.err
    turns = 1 if name in ("visible", "hidden") else 3
    for index, encoded in enumerate(encoded_examples(model_folder, turns, choices=tuple(EQUAL))):
        mine = lines[index * turns : (index + 1) * turns]
        for turn in range(0, turns, 2):
            weights = [plain(before(encoded, turn, name, mine), choice) for choice in encoded.turns[turn].choices]
            for found, expected in zip(mine[turn].facts["logprobs"], weights, strict=True):
                assert found == pytest.approx(expected, abs=2e-5)
            best = max(range(4), key=lambda i: sum(weights[i]))
            assert (mine[turn].prediction, mine[turn].ids) == (EQUAL[best], encoded.turns[turn].choices[best])
    assert len({x.prediction for x in lines if x.facts["kind"] == "choice"}) > 1


def test_the_choice_is_made_by_the_log_probabilities_that_are_recorded():
    """The second is more likely by 2e-6, which five digits do not show: a verification takes the first, too."""
    logits = {(0,): torch.tensor([[0.0, 1e-6]]), (1,): torch.tensor([[-1e-6, 1e-6]])}
    talk = SimpleNamespace(resume=lambda: None)
    job = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    turn, ids = SimpleNamespace(choices=("a", "b")), SimpleNamespace(choices=((0,), (1,)))
    with pytest.raises(StopIteration) as ended:
        next(reply.choose_passes(job, talk, turn, ids, logits))
    found = ended.value.value
    assert (found.text, found.ids, found.facts["logprobs"]) == ("a", (0,), [[-0.69315], [-0.69315]])


def test_no_tokens_are_generated_for_choices(toys):
    """No tokens, no steps, no time per token; the reason is `choice`."""
    answer, lines, _ = toys("Mixed")
    assert [(x.stop_reason, x.tokens.generated, x.times.steps) for x in lines] == [("choice", 0, 0)] * 4
    assert (answer.json["output"]["tokens"], answer.json["output"]["stop_reasons"]) == (0, {"choice": 4})
    assert answer.json["latency"]["tpot_s"] is None


def test_a_scorer_averages_over_its_own_turns(toys):
    """A mixed task has a mean for each half, over the turns that its scorer applies to."""
    answer, lines, _ = toys("Mixed", *REFERENCE)
    assert [set(x.scores) for x in lines] == [{"right@1"}, {"letters@1"}, {"right@1"}] * 4
    assert [x.score for x in lines] == [x.scores.get("right@1") for x in lines]
    assert answer.json["score"]["mean"] == sum(x.prediction == " sky" for x in lines if x.turn != 1) / 8
    assert answer.json["scores"]["letters@1"] == sum(40 - len(x.prediction) for x in lines if x.turn == 1) / 4
    assert [x["n"] for x in answer.json["score"]["by_turn"]] == [4, 0, 4]
    assert [x["mean"] is None for x in answer.json["score"]["by_turn"]] == [False, True, False]
    assert re.search(r"by turn\W+[\d.]+  -  [\d.]+", answer.out)
    assert answer.json["n_scored"] == 4


def test_truncated_prompts_are_counted(toys):
    """Samples, not turns; the table says so."""
    answer, lines, _ = toys("Mixed", *REFERENCE)
    cut = sum("cut_tokens" in x.facts for x in lines)
    assert 0 < cut < 4
    assert answer.json["output"]["truncated"] == cut
    assert f"{cut} of 4 prompts: too long, middle left out" in answer.out


@pytest.mark.slow
def test_a_stop_token_of_the_task_ends_an_answer(toys):
    """It is in the spec next to the model's stop tokens, and is forbidden as the first token of nonempty answers."""
    _, lines, _ = toys("Mixed", *REFERENCE, "--turns", "2")
    first = lines[1].ids[0]
    stopped, lines, _ = toys("Mixed", *REFERENCE, "--turns", "2", "--task-set", f"stop={first}")
    assert stopped.json["task"]["stop"] == [0, first]
    assert (lines[1].ids, lines[1].prediction, lines[1].stop_reason) == ((first,), "", "stop")
    answer, lines, _ = toys("Nonempty", *REFERENCE, "--turns", "2", "--task-set", f"stop={first}")
    assert answer.code == 0, answer.err
    assert all(x.ids[0] not in (0, first) and x.prediction for x in lines if x.turn == 1)


def test_the_capacity_includes_the_longest_choice():
    """Choices count like new tokens, and remain in the history of mode own."""
    words = EncodedTurn((1,) * 3, (1,) * 4, (1,) * 2)
    encoded = Encoded((1,) * 100, (replace(words, choices=((1,) * 30, (1,) * 2)), words))

    def most(mode, history):
        return find_capacity(encoded, SimpleNamespace(mode=mode, history=history), [0, 6])

    assert most(Mode.MULTI_REQUEST, "reference") == 100 + 3 + 30
    assert most(Mode.MULTI_TURN, "reference") == 100 + 3 + 30
    assert most(Mode.MULTI_TURN, "own") == 100 + 3 + 30 + 4 + 6


def test_a_choice_beyond_the_context_window_is_refused(toys):
    """Before any run, with the number of tokens that it needs."""
    answer, *_ = toys("Mixed", choices=[" sky", "x" * 500])
    assert answer.code == 2
    assert "needs up to 548 tokens, and model" in answer.err
    fits, lines, _ = toys("Mixed", choices=[" sky", "x" * 400])
    assert fits.code == 0
    assert {len(x.facts["logprobs"][1]) for x in lines} == {400}


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.MULTI_REQUEST])
def test_a_reference_that_is_compared_has_room(mode):
    """One that is longer than the answer may be is forced on a fork, which would copy a cache that is too small."""
    turn = EncodedTurn((1,) * 3, (1,) * 4, (1,) * 20)
    encoded, spec = Encoded((1,) * 50, (turn,)), SimpleNamespace(mode=mode, history="reference")
    assert find_capacity(encoded, spec, [5]) == 50 + 3 + 5
    assert find_capacity(encoded, spec, [30], compares=True) == 50 + 3 + 30
    with Session(tiny_model(), FullCache(), capacity=find_capacity(encoded, spec, [5], compares=True)) as session:
        session.prefill(encoded.context)
        session.question(turn.first, 5)
        with session.fork() as branch:
            branch.force(turn.answer)
            places = [{x.keys.untyped_storage().data_ptr() for x in both.layers} for both in (session, branch)]
    assert places[0] == places[1]


def test_a_reference_beyond_the_context_window_is_refused(kvbench, arguments):
    """Before any run, if it is compared; the full cache is compared with nothing, and never runs it."""
    arguments += ["--task-set", f"word={'x' * 500}"]
    refused = kvbench(*arguments, "--method", LAST)
    assert refused.code == 2
    assert "tokens, and model" in refused.err
    assert kvbench(*arguments, "--method", "full").code == 0


def test_a_choice_with_nan_probability_fails_its_sample(toys, monkeypatch):
    """No choice is selected, and the run has no score."""

    def passes(_, answer, **__):
        yield from ()
        return torch.full((len(answer), 257), math.nan)

    monkeypatch.setattr(reply, "force_answer_passes", passes)
    answer, lines, _ = toys("Mixed")
    assert answer.code == 1
    assert [x.error for x in lines] == ["ValueError: a choice has log-probabilities that are not finite"] * 4
    assert (answer.json["score"]["mean"], answer.json["score"]["partial_mean"]) == (None, None)


def test_a_method_that_fails_on_choices_is_no_zero(toys):
    """As where tokens are generated."""
    answer, lines, _ = toys("Mixed", "--set", "fails_at=1", method=LAST)
    assert [x.error for x in lines] == [None, "MemoryError: out of memory (toy.py, line 102)", None, None]
    assert answer.json["score"]["mean"] is None and answer.json["score"]["partial_mean"] is not None


@pytest.mark.parametrize("name", ["reference", "own"])
def test_what_forced_tokens_read_is_counted(toys, name):
    """A method that selects what it reads has acted, though no token was generated."""
    answer, *_ = toys("Weighed", *MODES[name], "--length", "200", "--budget", "64", method="quest")
    assert answer.code == 0, answer.err
    assert (answer.json["effect"]["n_acted"], answer.json["effect"]["n"]) == (4, 4)
    memory = answer.json["memory"]
    assert 0 < memory["read_bytes_per_step"] < memory["full_bytes"]


def test_a_choice_stays_whole_in_the_history(toys, model_folder):
    """Also where its last token would end an answer: the full cache runs the same conversation."""
    stop = AutoTokenizer.from_pretrained(model_folder)("y").input_ids[0]
    choices = [" sky", " toy", " boy"]
    answer, lines, _ = toys(
        "Mixed", *OWN, "--budget", "100%", "--task-set", f"stop={stop}", method=LAST, choices=choices
    )
    assert answer.code == 0, answer.err
    assert all(x.ids[-1] == stop for x in lines if x.turn == 0)
    assert max(x.agreement.kl for x in lines) < 1e-9


# Rescoring


@pytest.mark.few
@pytest.mark.parametrize(("name", "scorer"), [("Mixed", "right@1"), ("Mixed", "letters@1"), ("Weighed", "weight@1")])
def test_rescoring_has_the_facts_that_scoring_had(toys, kvbench, name, scorer):
    """Those of the example, of the turn and of what was weighed; turns of the other half stay out."""
    answer, _, folder = toys(name, *REFERENCE)
    again = kvbench("score", folder, "--scorer", scorer, "--task", f"{TOYS}:{name}", "--json")
    assert again.code == 0, again.err
    assert again.json["score"]["mean"] == answer.json["scores"][scorer]


def test_a_scorer_that_applies_to_no_answer_gives_no_score(toys, kvbench):
    """The reason is named, in a run and after it, and is neither random weights nor a failed sample."""
    answer, _, folder = toys("Mixed", "--scorer", "letters@1")
    assert (answer.code, answer.json["score"]["mean"], answer.json["n_scored"]) == (0, None, 0)
    assert re.search(r"score\W+none: scorer letters@1 applies to no answer", answer.out)
    again = kvbench("score", folder, "--task", f"{TOYS}:Mixed")
    assert (again.code, "scorer letters@1 applies to no answer of run" in again.err) == (2, True)
    assert not (folder / "scores").exists()


def test_rescoring_counts_the_contexts_that_have_a_score(toys, kvbench):
    """As in the result of a run: a context without a turn that the scorer applies to does not count."""
    _, _, folder = toys("Mixed", *REFERENCE)
    path = folder / "samples.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    for line in lines:
        if line["index"] == 0:
            line["facts"]["kind"] = "other"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    again = kvbench("score", folder, "--scorer", "letters@1", "--task", f"{TOYS}:Mixed", "--json")
    assert (again.json["n_scored"], again.json["n_samples"]) == (3, 4)


def test_rescoring_a_journal_without_facts_is_refused(toys, kvbench):
    """One line, exit code 2, and nothing is written."""
    _, _, folder = toys("Weighed")
    path = folder / "samples.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    for line in lines:
        del line["facts"]["logprobs"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    answer = kvbench("score", folder, "--task", f"{TOYS}:Weighed")
    assert answer.code == 2
    assert "has no logprobs in its journal, which scorer weight@1 needs" in answer.err
    assert not (folder / "scores").exists()


# Agreement by distance


def logits(wrong: range, n: int) -> torch.Tensor:
    """The first of two tokens is likely, the second where wrong. [n, 2]"""
    found = torch.tensor([[2.0, 0.0]]).repeat(n, 1)
    found[list(wrong)] = torch.tensor([0.0, 2.0])
    return found


def test_agreement_by_distance():
    """Parts double from 64 on, and together they are the whole."""
    found = compare_logits(logits(range(64, 128), 150), logits(range(0), 150))
    assert [(x.start, x.top1, x.n) for x in found.by_distance] == [(0, 1.0, 64), (64, 0.0, 64), (128, 1.0, 22)]
    odds = 1 / (1 + math.exp(-2))
    assert [x.kl for x in found.by_distance] == pytest.approx([0, 2 * (2 * odds - 1), 0], abs=1e-6)
    assert found.top1 == pytest.approx(86 / 150)
    assert found.kl == pytest.approx(64 / 150 * 2 * (2 * odds - 1), abs=1e-6)


@pytest.mark.parametrize(
    ("n", "sizes"),
    [(1, []), (63, []), (64, [64]), (65, [64, 1]), (256, [64, 64, 128]), (600, [64, 64, 128, 256, 88])],
)
def test_parts_of_an_answer(n, sizes):
    """Short answers have none, and no token is left out."""
    assert [x.n for x in compare_logits(logits(range(0), n), logits(range(0), n)).by_distance] == sizes


def test_the_agreement_of_a_run_is_the_mean_over_turns():
    """Part by part, over the turns that reach it."""
    def turn(*tops):
        parts = tuple(AgreementPart(start=64 * i, top1=x, kl=1 - x, n=10) for i, x in enumerate(tops))
        agreement = Agreement(top1=tops[0], kl=tops[0] / 4, n=10 * len(tops), by_distance=parts)
        return Line.model_construct(agreement=agreement)

    found = _agreement([turn(1.0, 0.5), turn(0.5)])
    assert (found.top1, found.kl, found.n) == (0.75, 0.1875, 30)
    assert [(x.start, x.top1, x.kl, x.n) for x in found.by_distance] == [(0, 0.75, 0.25, 20), (64, 0.5, 0.5, 10)]


def test_drift_is_shown(toys):
    """A run of long answers says how agreement changes with the distance."""
    answer, lines, _ = toys("Weighed", "--budget", "50%", method=LAST, choices=["y" * 70])
    (near, far) = answer.json["agreement"]["by_distance"]
    assert (near["start"], near["n"], far["start"], far["n"]) == (0, 256, 64, 24)
    assert near["top1"] == pytest.approx(sum(x.agreement.by_distance[0].top1 for x in lines) / 4)
    shown = f"from 0: {near['top1']:.3f}  from 64: {far['top1']:.3f}"
    assert shown in answer.out
