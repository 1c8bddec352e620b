"""Answers together against one at a time, and against kvpress's pipeline: parts `batch` and `peer` of `make bench`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from kvbench.budget import Budget
from kvbench.engine.passes import Passes, finish, merge
from kvbench.engine.session import Session
from kvbench.hf import Model, attached, find_folder, load_model
from kvbench.machine import cache_folder
from kvbench.methods.eviction.snapkv import SnapKV

NAME = "smollm2-135m"
LENGTH, NEW_TOKENS, ASKED, CONTEXTS, ROUNDS = 2048, 32, 5, 4, 3
PARITY = Path(__file__).parent / "parity"
sys.path.append(str(PARITY))

from cases import KVPRESS  # noqa: E402  # of that folder


class Conversations:
    """Contexts of random tokens with five questions each, which are prefilled and answered under SnapKV at 25 %."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.method = SnapKV().fit(Budget("fraction", 0.25), model.shape(LENGTH))
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> list[int]:
            return torch.randint(1000, 20000, (count,), generator=generator).tolist()

        self.questions = [draw(10 + x) for x in range(ASKED)]
        self.contexts = [draw(LENGTH) for _ in range(CONTEXTS)]

    def prefill(self, stack: ExitStack, count: int) -> list[Session]:
        """Sessions on the first contexts."""
        sessions = []
        for context in self.contexts[:count]:
            session = stack.enter_context(Session(self.model, self.method, capacity=LENGTH + 100))
            session.prefill(context)
            sessions.append(session)
        return sessions

    def answer(self, sessions: list[Session], width: int) -> list[list[int]]:
        """The answers to every question about every context, at most `width` at once."""
        return finish(merge((_ask(x, question) for x in sessions for question in self.questions), width))


def _ask(session: Session, question: list[int]) -> Passes[list[int]]:
    with session.fork() as branch:
        yield from branch.question_passes(question, NEW_TOKENS)
        return (yield from branch.answer_passes(NEW_TOKENS, stop=frozenset())).ids[0]


def bench_batch() -> dict[str, Any]:
    """Answers per CPU second with SnapKV at 25 %, decoded 5 and 20 together, over those decoded one at a time."""
    talk = Conversations(load_model(NAME, dtype="float32"))
    ratios: dict[int, list[float]] = {ASKED: [], ASKED * CONTEXTS: []}
    same = True
    with attached(talk.model.module), ExitStack() as stack:
        sessions = talk.prefill(stack, CONTEXTS)
        for number in range(ROUNDS + 1):
            started = time.process_time()
            answers = talk.answer(sessions[:1], 1)
            alone = (time.process_time() - started) / ASKED
            for width, found in ratios.items():
                started = time.process_time()
                made = talk.answer(sessions[: width // ASKED], width)
                found.append(alone * width / (time.process_time() - started))
                same &= made[:ASKED] == answers
            if number == 0:  # warm-up
                ratios = {x: [] for x in ratios}
    return {
        "model": NAME, "length": LENGTH, "new_tokens": NEW_TOKENS, "equal_answers": same,
        "speed_over_one_at_a_time": {str(width): _spread(x) for width, x in ratios.items()},
    }


def bench_peer() -> dict[str, Any]:
    """Answers, prefills and both per CPU second over those of kvpress's pipeline, on the same tokens, in turn."""
    folder = cache_folder() / "parity" / f"kvpress-{KVPRESS}"
    if not (folder / "made").exists():
        raise SystemExit(f"the part peer needs kvpress in {folder}. Run: make parity")
    talk = Conversations(load_model(NAME, dtype="float32"))
    kept = talk.method.entries_in(0, None)
    ratios: dict[int, dict[str, list[float]]] = {
        width: {"answers": [], "prefill": [], "all": []} for width in (ASKED, ASKED * CONTEXTS)
    }
    with attached(talk.model.module), _kvpress(folder) as ask:
        for number in range(ROUNDS + 1):
            for width, found in ratios.items():
                count = width // ASKED
                with ExitStack() as stack:
                    times = [time.process_time()]
                    sessions = talk.prefill(stack, count)
                    times.append(time.process_time())
                    talk.answer(sessions, width)
                    times.append(time.process_time())
                theirs = [ask(x, talk.questions) for x in talk.contexts[:count]]
                if {x["kept"] for x in theirs} != {kept}:
                    raise SystemExit(f"kvpress keeps {theirs[0]['kept']} entries per head, kvbench {kept}.")
                before, after = (sum(x[name] for x in theirs) for name in ("prefill_s", "answers_s"))
                found["prefill"].append(before / (times[1] - times[0]))
                found["answers"].append(after / (times[2] - times[1]))
                found["all"].append((before + after) / (times[2] - times[0]))
            if number == 0:  # warm-up
                ratios = {width: {name: [] for name in found} for width, found in ratios.items()}
    return {
        "model": NAME, "length": LENGTH, "new_tokens": NEW_TOKENS, "kvpress": KVPRESS,
        "speed_over_kvpress": {
            str(width): {name: _spread(x) for name, x in found.items()} for width, found in ratios.items()
        },
    }


@contextmanager
def _kvpress(folder: Path) -> Iterator[Callable[[list[int], list[list[int]]], dict[str, float]]]:
    """A function that has kvpress's process prefill a context and answer questions about it."""
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [folder / "bin" / "python", PARITY / "answer.py", find_folder(NAME)]
    with subprocess.Popen(  # noqa: S603  # the interpreter of `make parity`
        command, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, made = process.stdin, process.stdout

        def ask(context: list[int], questions: list[list[int]]) -> dict[str, float]:
            asked = {"context": context, "questions": questions, "new_tokens": NEW_TOKENS}
            print(json.dumps(asked), file=given, flush=True)
            found: dict[str, float] = json.loads(made.readline())
            return found

        yield ask
        given.close()


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "rounds": len(ratios)}
