"""Levels above L0: honest runs pass, fabricated answers are refused."""

from __future__ import annotations

import json
import math

import pytest

from kvbench.custom.task import CustomTask
from kvbench.errors import UserError
from kvbench.leaderboard.submission.archive import write_tar
from kvbench.leaderboard.submission.bundle import open_bundle
from kvbench.leaderboard.submission.deliver import put_in_folder
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import RESULT, RerunResult, Verification
from kvbench.leaderboard.submission.seal import is_believed
from kvbench.leaderboard.verification import fresh_seed, levels, rerun_job
from kvbench.leaderboard.verification.fresh_seed import _permutation_p, count_contexts, run_fresh_seed
from kvbench.leaderboard.verification.levels import rerun_levels
from kvbench.leaderboard.verification.lookup import UnverifiableError
from kvbench.leaderboard.verification.measurements import LATER, check_measurements
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.rerun import _check_agreement
from kvbench.leaderboard.verification.rerun_job import load_rerun_model, prepare_rerun
from kvbench.leaderboard.verification.verify import verify
from kvbench.registry import find_method
from kvbench.runs.progress import show_progress
from kvbench.tasks.dataset import DatasetTask
from kvbench.tasks.ruler.niah import Niah
from kvbench.tasks.ruler.qa import FileQa

from .conftest import edit, edit_spec, make_run, on_gpu
from .test_forgeries import in_spec

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _loaded(snapkv, monkeypatch):
    """Reuse the model of the runs, since loading takes longer than running."""
    monkeypatch.setattr(levels, "load_rerun_model", lambda _: snapkv.job.model)


@pytest.fixture
def verify_with():
    """Verifies a bundle with these rerun options."""

    def record(files, share=None, secret=None):
        found = verify(files, Repository())
        if share is not None:
            rerun_levels(found, share, 0, secret, show_progress)
        return found.conclude()

    return record


@pytest.fixture
def forged(runs, snapkv):
    """The full cache's right answers in place of the method's, with all numbers adjusted."""
    right = runs["full"].bundle.lines

    def answer(number, line):
        names = ("prediction", "ids", "score", "scores", "tokens", "stop_reason")
        return line.model_copy(update={name: getattr(right[number], name) for name in names})

    return snapkv.with_lines(answer)


def test_rerunning_a_share_gives_l1(snapkv, verify_with):
    record = verify_with(snapkv.files, 0.5)
    assert record.level == "L1" and record.rerun is not None
    assert (record.rerun.samples, record.rerun.answers, record.rerun.same_answers) == (2, 4, 4)
    assert record.rerun.same_tokens == record.rerun.tokens > 0
    assert record.rerun.mean == record.rerun.submitted_mean


@pytest.mark.slow
def test_a_journal_of_kvbench_0_1_is_rerun(snapkv, verify_with):
    """Fields that it does not have are not compared; to leave out some of them is refused."""
    def leave_out(names):
        drop = dict.fromkeys(names)
        lines = snapkv.with_lines(lambda _, x: x.model_copy(update={"bytes": x.bytes.model_copy(update=drop)}))
        files = edit(lines, RESULT, lambda x: x["memory"].update(drop))
        return verify_with(in_spec("sources", "harness", value="1" * 64)(files), 0.5)

    assert leave_out(LATER["bytes"]).level == "L1"
    refused = next(x.reason for x in leave_out(LATER["bytes"][:1]).checks if x.outcome == "refused")
    assert "its bytes.end_stored_bytes is None" in refused


def test_a_journal_without_the_counter_of_host_entries_is_compared_without_it(snapkv):
    """Methods that did not count them do now; where both count, they must agree."""
    def count(line, n):
        facts = {**line.effect.facts, "entries_on_simulated_host": n}
        return line.model_copy(update={"effect": line.effect.model_copy(update={"facts": facts})})

    line = snapkv.bundle.lines[0]
    check_measurements([(line, count(line, 900))], [True])
    with pytest.raises(RefusedError, match="entries_on_simulated_host is 500"):
        check_measurements([(count(line, 500), count(line, 900))], [True])


@pytest.mark.slow
def test_rerunning_all_samples_gives_l2(snapkv, verify_with):
    assert verify_with(snapkv.files, 1.0).level == "L2"


def test_a_small_share_draws_one_sample(snapkv, verify_with):
    rerun = verify_with(snapkv.files, 0.001).rerun
    assert (rerun.samples, rerun.share) == (1, 0.25)


def test_consistent_forged_answers_pass_l0_and_fail_l2(forged, verify_with):
    """Only a rerun can refute a consistent forgery; the reason states both means."""
    assert verify_with(forged).level == "L0"
    record = verify_with(forged, 1.0)
    assert (record.level, record.refused) == (None, True)
    assert record.rerun.same_tokens < record.rerun.tokens
    assert record.rerun.mean < record.rerun.submitted_mean == 1.0
    assert "divergences in" in next(x.reason for x in record.checks if x.outcome == "refused")


def change_bytes(**factors):
    def change(line):
        found = {name: round(getattr(line.bytes, name) * factor) for name, factor in factors.items()}
        return {"bytes": line.bytes.model_copy(update=found)}

    return change


@pytest.mark.few
@pytest.mark.parametrize(("change", "name"), [
    (change_bytes(end_bytes=0.9), "bytes.end_bytes"),
    (change_bytes(peak_bytes=0.9), "bytes.peak_bytes"),
    (lambda x: {"effect": x.effect.model_copy(update={"facts": {"entries_dropped": 2000}})},
     "effect.facts.entries_dropped"),
    (lambda x: {"agreement": x.agreement.model_copy(update={"top1": 1.0, "kl": 0.0})}, "top-1 agreement"),
])
def test_other_measurements_than_the_reruns_are_refused(snapkv, verify_with, change, name):
    """All of them pass L0: only a rerun can tell."""
    files = snapkv.with_lines(lambda _, x: x.model_copy(update=change(x)))
    assert verify_with(files).level == "L0"
    record = verify_with(files, 1.0)
    assert record.level is None and name in record.checks[-1].reason


@pytest.mark.slow
def test_another_chunk_size_shows_in_the_peak(snapkv, verify_with):
    """L0 cannot know it: a run in chunks has all entries of all layers before any layer is compressed."""
    files = edit_spec(snapkv.files, lambda x: x.update(chunk=64))
    assert verify_with(files).level == "L0"
    record = verify_with(files, 0.5)
    assert record.level is None and "its bytes.peak_bytes is" in record.checks[-1].reason


@pytest.mark.few
@pytest.mark.parametrize(("method", "options", "change", "name"), [
    ("prompt-lookup", {}, lambda x: {"lossless": x.lossless.model_copy(update={"drafted": x.lossless.drafted - 5})},
     "lossless.drafted"),
    ("cacheblend", {"task": "reuse-order", "length": 512},
     lambda x: {"reuse": x.reuse.model_copy(update={"hits": x.reuse.hits + 9})}, "reuse.hits"),
])
def test_records_of_drafts_and_reuse_are_compared(verify_with, tmp_path, method, options, change, name):
    done = make_run(tmp_path, method, samples=1, turns=1, mode="single", visibility=None, **options)
    assert verify_with(done.files, 1.0).level == "L2"
    record = verify_with(done.with_lines(lambda _, x: x.model_copy(update=change(x))), 1.0)
    assert record.level is None and f"its {name} is" in record.checks[-1].reason


@pytest.mark.slow
def test_a_trained_part_that_differs_is_named(verify_with, tmp_path, monkeypatch):
    """L0 knows a part that is not shipped by its hash only; the scores that count are those of the verifier's part."""
    monkeypatch.setattr("kvbench.leaderboard.verification.declared.find_shipped", lambda *_: None)
    done = make_run(tmp_path, "longspec", samples=1, turns=1, mode="single", visibility=None)
    assert verify_with(done.files, 1.0).rerun.differs == ()
    forged = edit(done.files, RESULT, lambda x: x["budget"]["resolved"].update(trained_on="nothing"))
    record = verify_with(forged, 1.0)
    assert (record.level, record.rerun.differs) == ("L2", ("budget.resolved.trained_on",))


@pytest.mark.slow
def test_the_score_of_a_rerun_is_the_verifiers(runs, snapkv, verify_with):
    """One mended answer is within the allowed divergence, and does not change the published score."""
    right = runs["full"].bundle.lines
    wrong = next(i for i, x in enumerate(snapkv.bundle.lines) if x.score == 0)
    names = ("prediction", "ids", "score", "scores", "tokens", "stop_reason")
    files = snapkv.with_lines(lambda i, x: x if i != wrong else x.model_copy(
        update={name: getattr(right[i], name) for name in names}
    ))
    record = verify_with(files, 1.0)
    assert record.level == "L2"
    assert record.rerun.submitted_mean > record.rerun.mean == record.score.mean
    assert [(x.index, x.turn, x.score) for x in record.rerun.other_scores] == [(wrong // 2, wrong % 2, 0.0)]


def test_mended_answers_are_refused_by_the_sign_test():
    """Nine of nine differing scores that are better have p = 2**-9."""
    found = RerunResult(
        share=1.0, seed=0, samples=20, answers=40, same_answers=31, tokens=2390, same_tokens=2381, submitted_mean=0.475,
        mean=0.25, differs=(), cpu="x", gpu=None,
    )
    check = _check_agreement(found, (0, 0), 9, 2390, [1.0] * 9)
    assert (check.outcome, "9 of 9 scores that differ are better than here" in check.reason) == ("refused", True)
    assert _check_agreement(found, (0, 0), 9, 2390, [1.0, -1.0] * 4).outcome == "ok"
    one = found.model_copy(update={"samples": 1})
    assert _check_agreement(one, (0, 0), 0, 9, []).reason.startswith("1 sample rerun: ")
    assert _check_agreement(one, (0, 1), 0, 9, []).reason.startswith("1 sample fails here, and 0 in its journal; ")


@pytest.mark.parametrize(("divergences", "compared", "outcome"), [
    (1, 1, "ok"), (2, 13, "ok"), (3, 13, "refused"), (8, 239, "ok"), (12, 239, "refused"), (64, 2390, "ok"),
    (70, 2390, "refused"),
])
def test_more_divergences_than_between_processors_are_refused(divergences, compared, outcome):
    """The limit follows from the measured rate, 2 % of the tokens, and the number of tokens."""
    found = RerunResult(
        share=1.0, seed=0, samples=4, answers=8, same_answers=0, tokens=compared, same_tokens=0, submitted_mean=0.5,
        mean=0.5, differs=(), cpu="x", gpu=None,
    )
    assert _check_agreement(found, (0, 0), divergences, compared, []).outcome == outcome


def test_differing_source_hashes_are_named_and_not_refused(snapkv, verify_with):
    files = edit_spec(snapkv.files, lambda x: x["sources"].update(method="0" * 64))
    record = verify_with(files, 0.25)
    assert record.level == "L1" and "sources.method" in record.rerun.differs


def test_a_run_of_a_gpu_is_rerun_on_a_cpu(snapkv, verify_with):
    record = verify_with(on_gpu(snapkv), 0.25)
    assert record.level == "L1" and "device" in record.rerun.differs


def test_a_changed_stop_token_is_refused_by_a_rerun(snapkv, verify_with, monkeypatch):
    """L0 does not know which tokens end an answer where no file of the model names them."""
    monkeypatch.setattr("kvbench.leaderboard.verification.answers._read_stop_ids", lambda path: ())
    files = edit_spec(snapkv.files, lambda x: x["task"].update(stop=[0, 255]))
    assert "its task.stop" in verify_with(files, 0.25).checks[-1].reason


def test_a_rerun_opens_no_file_of_the_submitter(snapkv):
    version = find_method("duo-attention").card.version
    settings = {"gates": "/etc/passwd", "gates_sha256": "0" * 64}
    gated = {"name": "duo-attention", "version": version, "settings": settings}
    spec = snapkv.bundle.spec
    spec = spec.model_copy(update={"method": spec.method.model_copy(update=gated)})
    with pytest.raises(UnverifiableError, match="setting gates of duo-attention may name a file of the submitter"):
        prepare_rerun(spec, snapkv.job.model)


def test_a_rerun_that_this_machine_cannot_make_is_flagged(snapkv, verify_with, monkeypatch):
    """It says nothing about the submission."""
    def prepare(*_: object) -> None:
        raise UserError("the model needs 900 GB.")

    monkeypatch.setattr("kvbench.leaderboard.verification.rerun_job.prepare", prepare)
    record = verify_with(snapkv.files, 0.25)
    assert (record.checks[-1].outcome, record.level) == ("flag", "L0")
    assert record.checks[-1].reason == "not run: the model needs 900 GB."


@pytest.mark.slow
def test_a_conversation_with_a_diffusion_model_can_be_rerun(tmp_path):
    """Its spec says that questions are visible, which is no option of its mode."""
    run = make_run(
        tmp_path, "none", model="mini-diffusion", samples=1, visibility=None, generation=("max_new_tokens=8",),
    )
    assert (run.bundle.spec.mode, run.bundle.spec.visibility) == ("multi-turn", "visible")
    job, differs = prepare_rerun(run.bundle.spec, run.job.model)
    assert (job.spec.run_id, differs) == (run.bundle.spec.run_id, ())


def test_the_rerun_uses_the_installed_model_of_that_name(snapkv):
    spec, model = snapkv.bundle.spec, load_rerun_model(snapkv.bundle.spec)
    assert (model.id, model.sha256, model.dtype) == ("mini", spec.model.sha256, spec.model.dtype)
    with pytest.raises(UnverifiableError, match="model '/etc' is not on this machine"):
        load_rerun_model(spec.model_copy(update={"model": spec.model.model_copy(update={"id": "/etc"})}))


def test_a_fresh_seed_gives_l3_and_stays_secret(snapkv, verify_with, monkeypatch):
    """Neither secret nor seed is written to the record. The rerun before it is not made twice here."""
    seeds = []
    prepare = fresh_seed.prepare_rerun
    monkeypatch.setattr(fresh_seed, "prepare_rerun", lambda spec, *x: seeds.append(spec.seed) or prepare(spec, *x))
    monkeypatch.setattr(fresh_seed, "count_contexts", lambda *_, **__: 4)
    record = verify_with(snapkv.files, 1.0, SECRET)
    assert record.level == "L3" and record.hidden is not None and record.rerun.share == 1
    assert record.hidden.submitted_mean == snapkv.bundle.result.score.mean
    assert 0.01 <= record.hidden.p_value <= 1
    written = record.model_dump_json()
    assert len(seeds) == 1 and seeds[0] != snapkv.bundle.spec.seed
    assert SECRET not in written and str(seeds[0]) not in written


def test_public_records_in_another_order_give_no_l3(snapkv, monkeypatch):
    """A false answer sheet of a data set holds under every seed."""
    monkeypatch.setattr(Niah, "fixed_examples", True)
    with pytest.raises(UnverifiableError, match=r"the examples of niah_\w+ are the same under every seed"):
        run_fresh_seed(snapkv.bundle, snapkv.job.model, SECRET, show_progress)


def test_tasks_over_the_records_of_a_data_set_say_so():
    assert DatasetTask.fixed_examples and FileQa.fixed_examples and CustomTask.fixed_examples
    assert not Niah.fixed_examples


@pytest.mark.slow
def test_a_refused_rerun_ends_before_the_fresh_seed(forged, verify_with, monkeypatch):
    monkeypatch.setattr(levels, "run_fresh_seed", lambda *_: pytest.fail("the fresh seed was run"))
    record = verify_with(forged, 1.0, SECRET)
    assert (record.level, record.hidden) == (None, None)


@pytest.mark.parametrize(("scores", "contexts"), [
    ([1.0] * 4, 6),  # C(4 + 6, 4) = 210 orders, of which one is as extreme
    ([0.5] * 4, 6), ([1.0, 1.0, 0.0, 0.0], 46), ([1.0] * 20, 20),
    ([1.0] * 1200, fresh_seed.MAX_CONTEXTS),
])
def test_the_fresh_seed_has_power_against_a_wholly_false_sheet(scores, contexts):
    """The permutation test refuses these scores if the method gets all of the new contexts wrong, and only then."""
    assert count_contexts(scores, higher_is_better=True) == contexts
    assert _permutation_p(scores, [0.0] * contexts) < fresh_seed.ALPHA
    if contexts > len(scores):
        fewer = contexts - 1
        k = sum(x > 0 for x in scores)
        assert math.comb(len(scores), k) / math.comb(len(scores) + fewer, k) >= fresh_seed.ALPHA / 2


@pytest.mark.parametrize("scores", [[0.0] * 20, [1.0] + [0.0] * 19, [1.0]])
def test_scores_that_no_new_contexts_can_refute_have_no_l3(scores):
    with pytest.raises(UnverifiableError, match=r"(could not refute them|it has one context)"):
        count_contexts(scores, higher_is_better=True)


def test_permutation_p_values_of_small_cases():
    """One of six assignments of 1, 1, 0, 0 is as extreme; equal means are exceeded by most."""
    assert _permutation_p([1, 1], [0, 0]) == pytest.approx(1 / 6)
    assert _permutation_p([1, 0], [1, 0]) == pytest.approx(5 / 6)
    assert _permutation_p([0, 0], [1, 1]) == 1
    assert _permutation_p([1.0] * 40, [0.9] * 40) < 0.001
    assert _permutation_p([1.0] * 40, [1.0] * 39 + [0.0]) > 0.4


def test_a_wholly_false_answer_sheet_of_four_contexts_is_refused(snapkv, forged, monkeypatch):
    """Even if it passes the rerun: its right answers do not hold on new contexts."""
    def fail(job, wanted, progress):
        del job, progress
        lines = forged_bundle.lines
        return [x.model_copy(update={"index": i, "score": 0.0}) for i in wanted for x in lines if x.index == 0]

    forged_bundle = open_bundle(forged)
    monkeypatch.setattr(fresh_seed, "rerun_samples", fail)
    hidden, check = run_fresh_seed(forged_bundle, snapkv.job.model, SECRET, show_progress)
    assert (hidden.samples, hidden.submitted_mean, check.outcome) == (6, 1.0, "refused")
    assert "does not hold on new examples" in check.reason


def test_rerun_on_the_command_line(kvbench, snapkv, tmp_path):
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    done = kvbench("leaderboard", "rerun", folder, "--share", "25%", "--write", "--json")
    assert (done.code, done.json[0]["level"]) == (0, "L1")
    written = json.loads((folder / "verification.json").read_text())
    assert written == {key: value for key, value in done.json[0].items() if key != "path"} | {"seal": written["seal"]}
    assert is_believed(Verification.model_validate_json((folder / "verification.json").read_text()), folder)
    done = kvbench("leaderboard", "verify", tmp_path, "--write")
    assert done.code == 0, "what a verifier wrote is no part of the bundle"
    assert f"warning: {folder / 'verification.json'} had level L1 and has L0 now." in done.err
    assert "had level" not in kvbench("leaderboard", "verify", tmp_path, "--write").err


def test_a_folder_of_submissions_is_not_rerun(kvbench, snapkv):
    """Its record would lie in a folder that is no submission."""
    done = kvbench("leaderboard", "rerun", snapkv.folder.parent, "--own", "--write")
    assert done.code == 2 and "is not one submission. Give the folder of one, or its .tar." in done.err
    assert not (snapkv.folder.parent / "verification.json").exists()


@pytest.mark.parametrize("command", ["verify", "rerun"])
def test_a_tar_takes_no_record_which_is_said_before_anything_runs(kvbench, snapkv, tmp_path, command):
    path = tmp_path / "bundle.tar"
    with path.open("wb") as file:
        write_tar(snapkv.files, file)
    done = kvbench("leaderboard", command, path, "--write")
    assert (done.code, done.out) == (2, "")
    assert f"--write needs a folder, and {path} is a .tar file" in done.err


@pytest.mark.slow
def test_samples_are_drawn_with_a_random_seed(kvbench, snapkv):
    found = [kvbench("leaderboard", "rerun", snapkv.folder, "--own", "--json").json[0] for _ in range(2)]
    assert found[0]["rerun"]["seed"] != found[1]["rerun"]["seed"]


@pytest.mark.parametrize(("options", "reason"), [
    (["--share", "0.1"], "--share 0.1 must be a percentage above 0%"),
    (["--share", "0%"], "--share 0% must be a percentage above 0%"),
    (["--share", "101%"], "--share 101% must be a percentage above 0% and up to 100%"),
    (["--share", "nan%"], "--share nan% must be a percentage above 0%"),
    (["--share", "50%", "--hidden-seed", "env:LONG"], "--share 50% is too little for --hidden-seed: L3 includes L2"),
    (["--hidden-seed", "/no/file"], "--hidden-seed /no/file cannot be read"),
    (["--hidden-seed", "env:SHORT"], "--hidden-seed env:SHORT holds fewer than 16 characters"),
    (["--hidden-seed", "env:UNSET"], "the variable UNSET is not set"),
])
def test_invalid_options_are_user_errors(kvbench, snapkv, options, reason, monkeypatch):
    monkeypatch.setenv("LONG", SECRET)
    monkeypatch.setenv("SHORT", "secret")
    monkeypatch.delenv("UNSET", raising=False)
    done = kvbench("leaderboard", "rerun", snapkv.folder, *options)
    assert (done.code, reason in done.err) == (2, True)


def test_the_progress_of_a_rerun_begins_with_no_sample(snapkv, monkeypatch):
    """The time left is estimated from the first report on, so the first sample counts."""
    monkeypatch.setattr(rerun_job, "make_examples", lambda job, wanted: [(x, None, None) for x in wanted])
    monkeypatch.setattr(rerun_job, "run_one", lambda *_: ([], None))
    reported = []
    rerun_job.rerun_samples(snapkv.job, [4, 7], reported.append)
    assert reported == [0, 1, 2]
