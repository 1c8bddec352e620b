"""The journal against prompts that were made again: each line fits its question, its answer, and its scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from pydantic_core import to_jsonable_python

from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.outcome import RefusedError, blaming, ok, show
from kvbench.leaderboard.verification.rebuilt import Replay
from kvbench.runs.examples import Made
from kvbench.runs.job import limit_of
from kvbench.runs.journal import Line
from kvbench.runs.sample import judge, note
from kvbench.runs.spec import RunSpec
from kvbench.task import Encoded, Example, Mode

LOGPROBS = "logprobs"
"""The one fact that comes from the model and not from the task."""
MOST_ID = 2**31
CLOSE = 1e-9


def check_prompts(replay: Replay, lines: Sequence[Line], making: Iterable[Made]) -> tuple[list[Made], Check]:
    """The run's examples, and that every line is of the question that they ask.

    Raises:
        RefusedError: one is not.
    """
    samples = [list(x) for _, x in groupby(lines, key=lambda line: line.index)]
    made = []
    for example, some in zip(making, samples, strict=False):
        made.append(example)
        for line in some:
            _check_prompt(replay.spec, line, *example)
    return made, ok("prompts", f"{len(made)} prompts made again from seed {replay.spec.seed} are those of the journal")


def _check_prompt(spec: RunSpec, line: Line, example: Example, encoded: Encoded) -> None:
    where = f"sample {line.index} turn {line.turn}"
    if line.prompt_hash != encoded.prompt_hash:
        raise RefusedError(
            "prompts", f"{where}: its prompt is {show(line.prompt_hash)}, the task's with seed {spec.seed} is "
            f"{encoded.prompt_hash}: answers to something else"
        )
    if line.sample != example.id or line.turns != len(example.turns):
        raise RefusedError("prompts", f"{where}: no such sample with {line.turns} turns, but {show(example.id)}")
    if line.references != example.turns[line.turn].references:
        raise RefusedError("prompts", f"{where}: its references are not the task's")
    facts = to_jsonable_python(note(example, line.turn))
    if {key: value for key, value in line.facts.items() if key != LOGPROBS} != facts:
        raise RefusedError("prompts", f"{where}: its facts are not the task's")
    if spec.model.kind == "diffusion" or line.tokens is None:
        return
    ids = encoded.turns[line.turn]
    asked = ids.later if line.turn and spec.mode is not Mode.MULTI_REQUEST else ids.first
    seen = () if spec.visibility == "hidden" else encoded.turns[0].first
    held, query = len(encoded.context) + len(seen), 0 if seen and line.turn == 0 else len(asked)
    if (line.tokens.context, line.tokens.query) != (held, query):
        raise RefusedError(
            "prompts", f"{where}: {line.tokens.context} tokens in its context and {line.tokens.query} in its question, "
            f"where the task has {held} and {query}"
        )


def check_answers(replay: Replay, lines: Sequence[Line], made: Sequence[Made]) -> Check:
    """Every prediction is what its token ids say, and as long as it may be.

    Raises:
        RefusedError: one is not.
    """
    spec, tokenizer = replay.spec, replay.model.tokenizer
    stop = set(spec.task.stop)
    for line in lines:
        turn, ids = made[line.index][0].turns[line.turn], made[line.index][1].turns[line.turn]
        where = f"sample {line.index} turn {line.turn}"
        if line.error is not None:
            if line.prediction is not None or line.ids or line.score is not None or line.scores:
                raise RefusedError("answers", f"{where} failed, and has an answer")
            continue
        if None in (line.tokens, line.times, line.bytes, line.effect):
            raise RefusedError("answers", f"{where} has an answer, and does not say what it took")
        if any(not 0 <= x < MOST_ID for x in line.ids) or (LOGPROBS in line.facts) is not bool(turn.choices):
            raise RefusedError("answers", f"{where} has a token id or log-probabilities that no model gave it")
        if turn.choices:
            text = next((x for x, y in zip(turn.choices, ids.choices, strict=True) if y == line.ids), None)
            generated, reason = 0, "choice"
            if text != line.prediction or text is None or not _weighs_most(line, ids.choices):
                raise RefusedError("answers", f"{where}: its answer is not the choice that weighs most")
        else:
            limit = limit_of(turn.max_new_tokens, spec.generation)
            with blaming("answers", f"{where} cannot be decoded"):  # a stop token can only be the last one, as is seen
                text = str(tokenizer.decode([x for x in line.ids if x not in stop], skip_special_tokens=True))
            generated = len(line.ids)
            reason = "stop" if line.ids and line.ids[-1] in stop else "length"
            if text != line.prediction:
                raise RefusedError("answers", f"{where}: its text {show(line.prediction)} is not that of its token ids")
            if generated > limit or stop & set(line.ids[:-1]):
                raise RefusedError("answers", f"{where}: its answer goes on after {limit} tokens or a stop token")
        if line.stop_reason != reason or line.tokens is None or line.tokens.generated != generated:
            raise RefusedError("answers", f"{where}: its token counts or its stop reason are not those of its answer")
    return ok("answers", f"{len(lines)} answers are the text of their token ids")


def _weighs_most(line: Line, choices: Sequence[Sequence[int]]) -> bool:
    """Whether the journal's own log-probabilities say so; whether they are true, only a run says."""
    logprobs = line.facts.get(LOGPROBS)
    try:
        sums = [math.fsum(x) for x in logprobs or ()]
        return [len(x) for x in logprobs or ()] == [len(x) for x in choices] and tuple(
            choices[max(range(len(sums)), key=sums.__getitem__)]
        ) == line.ids
    except (TypeError, ValueError):
        return False


def score_again(replay: Replay, lines: Sequence[Line], made: Sequence[Made]) -> list[Line]:
    """The lines with the scores that the task's scorers give their predictions; the submitter's are not looked at.

    Raises:
        RefusedError: a prediction that a scorer cannot take.
    """
    found = []
    for line in lines:
        scores: dict[str, float] = {}
        if line.prediction is not None:
            weighed = {LOGPROBS: line.facts[LOGPROBS]} if LOGPROBS in line.facts else {}
            with blaming("scores", f"sample {line.index} turn {line.turn} cannot be scored"):
                scores = judge(replay.job, made[line.index][0], line.turn, line.prediction, weighed)
        found.append(line.model_copy(update={"score": scores.get(replay.scorer.id), "scores": scores}))
    return found


def check_scores(lines: Sequence[Line], again: Sequence[Line]) -> Check:
    """Every line's scores are those that its prediction has.

    Raises:
        RefusedError: with both numbers.
    """
    for line, other in zip(lines, again, strict=True):
        for name in sorted({*line.scores, *other.scores, "score"}):
            said, found = (x.score if name == "score" else x.scores.get(name) for x in (line, other))
            if said is None or found is None or not math.isclose(said, found, rel_tol=CLOSE, abs_tol=CLOSE):
                if said == found:
                    continue
                raise RefusedError(
                    "scores", f"sample {line.index} turn {line.turn}: its {show(name)} is {said}, scored again {found}"
                )
    return ok("scores", f"{len(lines)} answers scored again")
