"""Checks a journal against regenerated prompts: every line must match its question, its token ids and its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import cast

from pydantic_core import to_jsonable_python

from kvbench.diffusion.policy import Policy
from kvbench.diffusion.sampling import plan_sampling
from kvbench.leaderboard.submission.outcome import RefusedError, ok, quote, refusing_errors
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.replay import Replay
from kvbench.method import Method
from kvbench.runs.examples import Made
from kvbench.runs.job import cap_new_tokens, check_capacity, find_capacity
from kvbench.runs.journal import Line
from kvbench.runs.lines import score_answer, turn_facts
from kvbench.runs.spec import RunSpec
from kvbench.task import Encoded, EncodedTurn, Example, Mode, Turn

LOGPROBS = "logprobs"
"""The only fact of a line that comes from the model; the task determines all others."""
TOLERANCE = 1e-9
LOGPROB_ROUNDING = 1e-3


def check_prompts(replay: Replay, lines: Sequence[Line], making: Iterable[Made]) -> tuple[list[Made], Check]:
    """Regenerate the run's examples, and check that every line belongs to one of their questions.

    Raises:
        RefusedError: a line has another prompt, reference or fact.
    """
    samples = [list(x) for _, x in groupby(lines, key=lambda line: line.index)]
    made = []
    for example, some in zip(making, samples, strict=False):
        made.append(example)
        for line in some:
            _check_prompt(replay.spec, line, *example)
        if some[-1].error is None and replay.spec.model.kind == "autoregressive":
            _check_length(replay, *example)
    return made, ok("prompts", f"{len(made)} prompts regenerated from seed {replay.spec.seed} match the journal")


def _check_prompt(spec: RunSpec, line: Line, example: Example, encoded: Encoded) -> None:
    where = f"sample {line.index} turn {line.turn}"
    if line.prompt_hash != encoded.prompt_hash:
        raise RefusedError(
            "prompts", f"{where}: its prompt hash is {quote(line.prompt_hash)}, the task's with seed {spec.seed} is "
            f"{encoded.prompt_hash}: it answers another prompt"
        )
    if line.sample != example.id or line.turns != len(example.turns):
        raise RefusedError(
            "prompts", f"{where}: its sample is {quote(line.sample)} with {line.turns} turns, the task's is "
            f"{quote(example.id)} with {len(example.turns)}"
        )
    if line.question not in (None, example.turns[line.turn].question):  # None: a journal of kvbench 0.1
        raise RefusedError("prompts", f"{where}: its question differs from the task's")
    if line.references != example.turns[line.turn].references:
        raise RefusedError("prompts", f"{where}: its reference answers differ from the task's")
    facts = to_jsonable_python(turn_facts(example, line.turn))
    if {key: value for key, value in line.facts.items() if key != LOGPROBS} != facts:
        raise RefusedError("prompts", f"{where}: its facts differ from the task's")
    if spec.model.kind == "diffusion" or line.tokens is None:
        return
    ids = encoded.turns[line.turn]
    asked = ids.later if line.turn and spec.mode is not Mode.MULTI_REQUEST else ids.first
    seen = () if spec.visibility == "hidden" else encoded.turns[0].first
    if line.tokens.reference not in (None, len(ids.answer)):  # None: a journal of kvbench 0.1
        raise RefusedError(
            "prompts", f"{where}: its reference answer has {line.tokens.reference} tokens, the task's has "
            f"{len(ids.answer)}"
        )
    context, query = len(encoded.context) + len(seen), 0 if seen and line.turn == 0 else len(asked)
    if (line.tokens.context, line.tokens.query) != (context, query):
        raise RefusedError(
            "prompts", f"{where}: {line.tokens.context} tokens in its context and {line.tokens.query} in its question, "
            f"but the task has {context} and {query}"
        )


def _check_length(replay: Replay, example: Example, encoded: Encoded) -> None:
    """Refuse a conversation with more tokens than the model supports."""
    limits = [cap_new_tokens(x.max_new_tokens, replay.spec.generation) for x in example.turns]
    with refusing_errors("prompts", "its conversations"):
        check_capacity(replay.job, find_capacity(encoded, replay.spec, limits))


def check_answers(replay: Replay, lines: Sequence[Line], made: Sequence[Made]) -> Check:
    """Check that every prediction decodes from its token ids and respects max_new_tokens and stop tokens.

    Raises:
        RefusedError: an answer does not.
    """
    for line in lines:
        turn, ids = made[line.index][0].turns[line.turn], made[line.index][1].turns[line.turn]
        where = f"sample {line.index} turn {line.turn}"
        if line.error is not None:
            if line.prediction is not None or line.ids or line.score is not None or line.scores:
                raise RefusedError("answers", f"{where} failed, but has an answer")
            continue
        if None in (line.tokens, line.bytes, line.effect):
            raise RefusedError("answers", f"{where} has an answer, but lacks tokens, bytes or effect")
        if any(not 0 <= x < replay.model.vocabulary for x in line.ids):
            raise RefusedError("answers", f"{where} has a token id outside the vocabulary of {replay.model.vocabulary}")
        if (LOGPROBS in line.facts) is not bool(turn.choices):
            raise RefusedError("answers", f"{where} has misplaced log-probabilities")
        if line.agreement is not None and line.agreement.n != len(ids.answer):
            raise RefusedError(
                "answers", f"{where}: its agreement has {line.agreement.n} positions, its reference answer "
                f"{len(ids.answer)} tokens"
            )
        if turn.choices:
            _check_choice(line, turn, ids, where)
            generated, reason = 0, "choice"
        else:
            generated, reason = len(line.ids), _check_generated(replay, line, turn, where)
        if line.stop_reason != reason or line.tokens is None or line.tokens.generated != generated:
            raise RefusedError("answers", f"{where}: its token counts or its stop reason do not match its answer")
    return ok("answers", f"{len(lines)} answers decode from their token ids")


def _check_choice(line: Line, turn: Turn, ids: EncodedTurn, where: str) -> None:
    """Refuse an answer that is not the most likely choice, and log-probabilities above 0. where: names the line."""
    text = next((x for x, y in zip(turn.choices, ids.choices, strict=True) if y == line.ids), None)
    if text != line.prediction or text is None or not _is_most_likely(line, ids.choices):
        raise RefusedError("answers", f"{where}: its answer is not the choice with the highest log-probability")
    if (most := max(y for x in line.facts[LOGPROBS] for y in x)) > LOGPROB_ROUNDING:
        raise RefusedError("answers", f"{where}: a log-probability of {most:g} is above 0")


def _check_generated(replay: Replay, line: Line, turn: Turn, where: str) -> str:
    """Refuse an answer that is not the text of its ids, or has too few or too many of them. Returns its stop reason."""
    spec, stop = replay.spec, set(replay.spec.task.stop)
    limit, generated = cap_new_tokens(turn.max_new_tokens, spec.generation), len(line.ids)
    with refusing_errors("answers", f"{where} cannot be decoded"):  # stop tokens are checked below
        ids = [x for x in line.ids if x not in stop]
        text = str(replay.model.tokenizer.decode(ids, skip_special_tokens=True))
    if text != line.prediction:
        raise RefusedError("answers", f"{where}: its text {quote(line.prediction)} is not the text of its token ids")
    reason = "stop" if line.ids and line.ids[-1] in stop else "length"
    if reason == "length" and generated < limit and spec.model.kind == "autoregressive":
        raise RefusedError(
            "answers", f"{where}: its answer ends after {generated} of {limit} tokens without a stop token"
        )
    if generated > limit or stop & set(line.ids[:-1]):
        raise RefusedError("answers", f"{where}: its answer continues after {limit} tokens or a stop token")
    return reason


def check_stop_tokens(replay: Replay, folder: Path) -> None:
    """Check that answers end at the tokenizer's and the task's stop tokens, and at no other than the model's own.

    Raises:
        RefusedError: a token is missing, or is a stop token by no file of the model.
    """
    tokenizer, stated = replay.model.tokenizer, set(replay.spec.task.stop)
    known = {*replay.task.stop_ids(tokenizer), tokenizer.eos_token_id} - {None}
    named = {x for name in ("generation_config.json", "config.json") for x in _read_stop_ids(folder / name)}
    if missing := sorted(known - stated):
        raise RefusedError("tokenizer", f"its answers do not end at token {missing[0]}, which stops {replay.model.id}")
    if named and (strange := sorted(stated - known - named)):
        raise RefusedError("tokenizer", f"its answers end at token {strange[0]}, which stops no {replay.model.id}")


def _read_stop_ids(path: Path) -> set[int]:
    """Ids in a configuration of the model; empty without such a file."""
    if not path.is_file():
        return set()
    document = json.loads(path.read_text(encoding="utf-8"))
    found = [x.get("eos_token_id") for x in (document, document.get("text_config") or {})]
    return {y for x in found for y in (x if isinstance(x, list) else [x]) if y is not None}


def check_denoising(spec: RunSpec, lines: Sequence[Line], made: Sequence[Made], method: Method | None) -> None:
    """Check that every answer of a diffusion model was made with the run's settings, and with its baselines.

    method: None if its code is unknown, which may take more passes than the schedule.

    Raises:
        RefusedError: one was not.
    """
    asked = spec.generation.denoising
    policy = None if method is None or method.card.models != "diffusion" else cast("Policy", method)
    for line in lines:
        if line.denoising is None or asked is None:
            continue
        found, where = line.denoising, f"sample {line.index} turn {line.turn}"
        limit = cap_new_tokens(made[line.index][0].turns[line.turn].max_new_tokens, spec.generation)
        with refusing_errors("answers", f"{where}: its denoising settings"):
            length, sampling = plan_sampling(asked, limit)
        steps = None if sampling.threshold is not None else sampling.steps
        for name, stated, ours in (
            ("response_length", found.response_length, length), ("block", found.block, sampling.block),
            ("steps", found.steps, steps),
            ("baselines", sorted(found.baselines), ["half-steps", "none"] if sampling.halved(length) else ["none"]),
        ):
            if stated != ours:
                raise RefusedError("answers", f"{where}: its {name} is {quote(stated)}, the run's settings give {ours}")
        most = sampling.steps + length // sampling.block  # a block may begin with a pass that denoises nothing
        if policy is not None and policy.scheduled and steps is not None and found.nfe > most:
            raise RefusedError("measurements", f"{where}: {found.nfe} forward passes in {steps} denoising steps")


def _is_most_likely(line: Line, choices: Sequence[Sequence[int]]) -> bool:
    """Whether the answer has the highest log-probability of the journal; only a rerun can check these values."""
    logprobs = line.facts.get(LOGPROBS)
    try:
        sums = [math.fsum(x) for x in logprobs or ()]
        return [len(x) for x in logprobs or ()] == [len(x) for x in choices] and tuple(
            choices[max(range(len(sums)), key=sums.__getitem__)]
        ) == line.ids
    except (TypeError, ValueError):
        return False


def rescore(replay: Replay, lines: Sequence[Line], made: Sequence[Made], *, every: bool) -> list[Line]:
    """Score the predictions with the task's scorers, ignoring the submitted scores.

    every: with all of them; else without those that no line has, which a task may have got since.

    Raises:
        RefusedError: a scorer fails on a prediction.
    """
    known = {replay.scorer.id, *(name for line in lines for name in line.scores)}
    found = []
    for line in lines:
        scores: dict[str, float] = {}
        if line.prediction is not None:
            weighed = {LOGPROBS: line.facts[LOGPROBS]} if LOGPROBS in line.facts else {}
            with refusing_errors("scores", f"sample {line.index} turn {line.turn} cannot be scored"):
                scores = score_answer(replay.job, made[line.index][0], line.turn, line.prediction, weighed)
        scores = {name: score for name, score in scores.items() if every or name in known}
        found.append(line.model_copy(update={"score": scores.get(replay.scorer.id), "scores": scores}))
    return found


def check_scores(lines: Sequence[Line], again: Sequence[Line]) -> Check:
    """Check that the submitted scores equal the recomputed ones.

    Raises:
        RefusedError: a score differs; the reason states both.
    """
    for line, other in zip(lines, again, strict=True):
        for name in sorted({*line.scores, *other.scores, "score"}):
            stated, found = (x.score if name == "score" else x.scores.get(name) for x in (line, other))
            if stated is None or found is None or not math.isclose(stated, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                if stated == found:
                    continue
                raise RefusedError(
                    "scores", f"sample {line.index} turn {line.turn}: its {quote(name)} is {stated}, recomputed {found}"
                )
    return ok("scores", f"{len(lines)} answers rescored")
