"""SCBench's Code.RepoQA; its scorers compare an answer with all requested functions of the repository."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import unknown
from kvbench.task import Example, Mode, Split, Turn
from kvbench.tasks.records import Columns, Record
from kvbench.tasks.scbench.official import Place, SCBench
from kvbench.tasks.scoring.repoqa import FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Repositories(SCBench):
    """Base class of tasks that ask for functions of a repository by their description."""

    columns: ClassVar[Columns] = {"context": str, "multi_turns": list, "lang": str, "repo": str}

    def record(self, index: int) -> Record:
        """Read and check one record, whose language must be one that the scorers know."""
        record = super().record(index)
        if record["lang"] not in FUNCTIONS:
            raise unknown("language of code", record["lang"], FUNCTIONS, f"In record {index} of {self.source.name}.")
        return record

    def facts(self, record: Record) -> Mapping[str, Any]:
        """The repository and its programming language."""
        return {"lang": record["lang"], "repo": record["repo"]}

    def functions(self, turns: Iterable[Record]) -> Iterator[tuple[str, str]]:
        """Names and source of the functions that turns ask for."""
        return ((turn["name"], turn["answer"]) for turn in turns)

    def collect(self, records: Iterable[int], turns: int | None) -> dict[str, dict[str, str]]:
        """Collect the requested functions by repository and name; of two with the same name, the first counts.

        turns: number of turns to look at in each record; None: all.
        """
        found: dict[str, dict[str, str]] = {}
        for record in map(self.record, records):
            known = found.setdefault(record["repo"], {})
            for name, source in self.functions(record["multi_turns"][:turns]):
                known.setdefault(name, source)
        return found

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Build examples; facts hold the functions of the repository from the `n` evaluated and from all records."""
        evaluated = self.collect(self.choose(n, seed), turns)
        everything = self.collect(range(len(self.source.records)), None)
        for example in super().examples(
            seed=seed, split=split, n=n, length=length, turns=turns, mode=mode, tokenizer=tokenizer
        ):
            repo = str(example.facts["repo"])
            pools = {"functions": evaluated[repo], "functions_all": everything[repo]}
            yield replace(example, facts={**example.facts, **pools})


@dataclass(frozen=True)
class CodeRepoQA(Repositories):
    """Repeat the function of a repository that fits a description."""

    name: ClassVar[str] = "scbench_repoqa"
    summary: ClassVar[str] = "SCBench Code.RepoQA: the function of a repository that fits a description"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    turn_columns: ClassVar[Columns] = {"input": str, "answer": str, "name": str}
    intro: ClassVar[str] = (
        "Based on the function description and code context, please retrieve and repeat the exact described function "
        "from the code context in a code block wrapped by ```:\n\n"
    )
    max_new_tokens: ClassVar[int] = 1024

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; its fact `name` is the function's name."""
        return replace(super().turn(asked, place), facts={"name": asked["name"]})
