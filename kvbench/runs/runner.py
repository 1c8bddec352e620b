"""Run the samples of a job into its journal and result. The same call resumes an interrupted run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import InterruptionError, UserError
from kvbench.kernels.choice import using
from kvbench.log import count, say
from kvbench.runs.batch import count_contexts, run_batch, run_one
from kvbench.runs.environment import find_machine
from kvbench.runs.examples import make_examples
from kvbench.runs.files import Journal, has_journal, locked, read_file, saving, write_record
from kvbench.runs.job import Job
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec
from kvbench.runs.summary import describe_mixed, find_machines, summarize

if TYPE_CHECKING:
    from kvbench.engine.shared import SharedPrefill
    from kvbench.runs.progress import Progress


class InterruptedRunError(InterruptionError):
    """Ctrl-C. Finished samples are saved, and the same command resumes the run."""


@dataclass(frozen=True)
class Outcome:
    """A result, and whether the run was finished before."""

    result: Result
    folder: Path
    existing: bool
    code_changes: tuple[str, ...] = ()
    """How the code that computed an existing run differs from the current code."""
    bound_changes: tuple[str, ...] = ()
    """How the values that the method found on the model for an existing run differ from those that it finds now."""

    def describe_existing(self) -> str:
        """A line for the log: the run was finished before, possibly by other code or with other values on the model."""
        other = f" It was computed by other code ({'; '.join(self.code_changes)})." if self.code_changes else ""
        if self.bound_changes:
            other += f" Its method had found other values on the model ({'; '.join(self.bound_changes)})."
        return f"already finished: showing {self.folder}.{other} Delete the folder to run it again."


def find_existing(job: Job) -> Outcome | None:
    """The finished run of this spec, if there is one."""
    path = job.folder / "result.json"
    if not path.exists():
        return None
    result = read_file(path, Result)
    return Outcome(
        result, job.folder, existing=True, code_changes=tuple(result.spec.find_code_changes(job.spec)),
        bound_changes=tuple(result.spec.find_bound_changes(job.spec)),
    )


def run(job: Job, progress: Progress | None = None) -> Outcome:
    """Run the missing samples and write the result; see `run_samples`."""
    samples = run_samples(job, progress)
    while True:
        try:
            next(samples)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def run_samples(
    job: Job, progress: Progress | None = None, shared: SharedPrefill | None = None
) -> Generator[int, None, Outcome]:
    """Run the missing samples, yielding the index of each before it is run, and write the result.

    shared: the prefills that runs on the same contexts share when they take turns; such a run has no times.

    Raises:
        SaveError: a file could not be written.
        InterruptedRunError: Ctrl-C.
        UserError: another process works on the folder, or other code computed the samples in it.
    """
    existing = find_existing(job)
    if existing is not None:
        return existing
    with locked(job.folder):
        existing = find_existing(job)  # another process may have finished it before the lock was acquired
        if existing is not None:
            return existing
        _claim_folder(job)
        journal = Journal(job.folder / "samples.jsonl")
        try:
            if journal.finished:
                say(f"resuming: {len(journal.finished)} of {job.spec.samples} samples are already done.")
                here = [find_machine(job.model.device.type)] if len(journal.finished) < job.spec.samples else []
                mixed = describe_mixed([*find_machines(journal.lines), *here])
                if mixed is not None:
                    say(f"{mixed}: the result will have scores but no times. For times, use another --out.")
            yield from _run_missing(job, journal, progress, shared)
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"interrupted: {len(journal.finished)} of {job.spec.samples} samples are saved in {job.folder}. "
                "Run the same command to resume."
            ) from None
        finally:
            journal.close()
        # Summarize the saved lines, so that a resumed run gives the same result.
        lines = [x for x in journal.lines if x.index < job.spec.samples]
        result = summarize(job, lines)
        write_record(job.folder / "result.json", result)
    return Outcome(result, job.folder, existing=False)


def _claim_folder(job: Job) -> None:
    """Write spec.json, or check that the samples in the folder were computed by the same code on the same values.

    Raises:
        UserError: they were not, no file says so, or the folder is of another run.
    """
    path, has_lines = job.folder / "spec.json", has_journal(job.folder / "samples.jsonl")
    if has_lines and not path.exists():
        raise UserError(
            f"{job.folder} holds samples without spec.json, which names the code that computed them, and one result "
            "cannot mix several. Delete the folder to start again, or give another --out."
        )
    if path.exists():
        saved = read_file(path, RunSpec)
        if saved.run_id != job.spec.run_id:
            raise UserError(f"{path} is of another run. Move the folder away, or give another --out.")
        changes = saved.find_code_changes(job.spec)
        if changes and has_lines:
            raise UserError(
                f"{job.folder} holds samples that other code computed ({'; '.join(changes)}), and one result cannot "
                "mix them. Delete the folder to start again, or give another --out."
            )
        changes = saved.find_bound_changes(job.spec)
        if changes and has_lines:
            raise UserError(
                f"{job.folder} holds samples for which {job.spec.method.name} found other values on the model "
                f"({'; '.join(changes)}), and one result cannot mix them. Give it the earlier file, or give another "
                "--out."
            )
    write_record(path, job.spec)


def _run_missing(
    job: Job, journal: Journal, progress: Progress | None, shared: SharedPrefill | None
) -> Generator[int, None, None]:
    missing = set(range(job.spec.samples)) - journal.finished
    machine = find_machine(job.model.device.type)
    compared = any(x.batch is not None and x.batch.tokens is not None for x in journal.lines)
    compares = job.spec.model.dtype != "float32" and not compared
    failures: Counter[str] = Counter()
    if progress is not None:
        progress(len(journal.finished))
    if shared is not None:
        shared.expect(job.method)
    samples = make_examples(job, missing)
    try:
        for first in samples:
            yield first[0]  # the other runs have said by now what their methods take from a shared prefill
            group = [first, *islice(samples, count_contexts(job, shared, first[2]) - 1)]
            with using(job.spec.kernels) as ran:
                if job.spec.batch > 1:
                    done = run_batch(job, group, shared, compare=compares)
                    compares = compares and all(x[0].batch is None or x[0].batch.tokens is None for x, _ in done)
                else:
                    done = [run_one(job, group[0], shared)]
            for (index, _, _), (lines, trace) in zip(group, done, strict=True):
                if trace is not None:
                    _log_failure(job.folder, index, str(lines[-1].error), trace, failures)
                journal.append([lines[0].model_copy(update={"kernels": ran, "machine": machine}), *lines[1:]])
            if progress is not None:
                progress(len(journal.finished))
    finally:
        for error, times in failures.items():
            if times > 1:
                say(f"{count(times - 1, 'more sample')} failed alike: {error}")


def _log_failure(folder: Path, index: int, error: str, trace: str, failures: Counter[str]) -> None:
    """Write the traceback to the log, and say the error the first time. failures: how often each happened."""
    path = folder / "errors.log"
    failures[error] += 1
    if failures[error] == 1:
        say(f"sample {index} failed: {error} (traceback in {path})")
    with saving(path), path.open("a", encoding="utf-8") as file:
        file.write(f"sample {index}\n{trace}\n")
