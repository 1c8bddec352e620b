"""Published numbers: read as they are printed, with their errors found, and findable by name."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from kvbench.errors import UserError
from kvbench.integrations.lmeval.source import PREFIX
from kvbench.reproduce.claims import Claim, find_claims, list_claims
from kvbench.reproduce.paper import FOLDER, list_papers, read_paper
from kvbench.reproduce.plan import plan_claim
from kvbench.runs.request import check

CLAIMS = [x for name, paper in list_papers().items() for x in list_claims(name, paper)]
TABLES = sorted({f"{x.paper}:{x.table.name}" for x in CLAIMS})
SHORT = """
title = "A paper"

[[table]]
name = "scores"
title = "Table 1"
where = "here"
evidence = "verified"
baseline = "full"

[table.columns]
needles = { task = "niah" }

[table.rows]
full = { method = "full" }
SnapKV = { method = "snapkv", budget = "25%" }

[table.models.mini]
id = "mini"
values.full = [99.0]
values.SnapKV = [98.5]
"""


def rows(table: str) -> dict[tuple[str, str], dict[str, Claim]]:
    """The numbers of a table by model and row, then by column."""
    found: dict[tuple[str, str], dict[str, Claim]] = {}
    for x in find_claims(table):
        found.setdefault((x.model, x.row), {})[x.column] = x
    return found


def test_the_tables_that_were_promised_are_there():
    """The papers of docs/reproducing.md, each with its numbers."""
    promised = {
        "snapkv:longbench", "pyramidkv:longbench", "kivi:longbench", "shadowkv:throughput", "dkv-cache:llada",
        "dkv-cache:dream", "quest:passkey-10k", "quest:latency", "scbench:multi-turn", "scbench:multi-request",
        "rocketkv:scbench", "kvmerger:longbench", "mustafar:speed", "cake:longbench", "razor-attention:longbench",
        "ruler:readme",
    }
    assert promised <= set(TABLES)
    assert {x.model for x in find_claims("snapkv:longbench")} == {
        "Mistral-7B-v0.2", "LWM-Text-Chat-1M", "LongChat-7B-v1.5-32k", "Mixtral-8x7B-Instruct"
    }


def test_every_number_has_a_name_of_its_own():
    """No two ids are the same, and each id finds its number and no other."""
    ids = [x.id for x in CLAIMS]
    assert len(set(ids)) == len(ids)
    for x in CLAIMS[::97]:
        assert [y.id for y in find_claims(x.id)] == [x.id]


@pytest.mark.parametrize(("claim", "printed"), [
    ("snapkv:longbench/mistral-7b-v0.2/snapkv-1024/qasper", 29.51),
    ("snapkv:longbench/mixtral-8x7b-instruct/h2o-4096/rb-p", 63.52),
    ("pyramidkv:longbench/llama-3-8b-instruct/pyramidkv-128/trec", 66.5),
    ("kivi:longbench/mistral-7b-instruct-v0.2/kivi-2/pre", 80.83),
    ("scbench:multi-turn/llama-3.1-8b/snapkv/retr.string", 6.1),
    ("rocketkv:scbench/llama-3.1-8b-instruct/rocketkv-mt-4096/multi-task", 60.3),
    ("dkv-cache:llada/llada-8b-instruct/dkv-decode/humaneval", 46.34),
    ("dkv-cache:dream-speed/dream-base-7b/dkv-prefill/gsm8k-256-128", 107.4),
    ("quest:latency/llama-2-7b/quest-awq-1024/16k", 11.0),
    ("shadowkv:throughput/glm-4-9b-1m/shadowkv/244k", 136.51),
    ("kvmerger:longbench/llama2-7b-chat/kvmerger-50/mf-en", 36.89),
    ("ruler:readme/llama3.1-8b/full/128k", 77.0),
    ("triattention:math-500/r1-llama-8b/r-kv", 76.9),
    ("lserve:longbench/llama-3-8b-1048k/lserve/hotpotqa", 42.7),
    ("indexcache:quality/glm-5/indexcache-1-2/mrcr", 72.3),
])
def test_numbers_are_those_of_the_sources(claim, printed):
    """A few of each table, typed again by hand."""
    assert [x.printed for x in find_claims(claim)] == [printed]


@pytest.mark.parametrize("table", [
    "pyramidkv:longbench", "kivi:longbench", "kvmerger:longbench", "defensivekv:ruler", "cake:reproduced-by-users",
    "ruler:readme", "shadowkv:ruler-pariskv", "lserve:longbench",
])
def test_a_mean_is_that_of_its_cells(table):
    """Printed means that no rounding explains are corrected, and no others."""
    whole = 0
    for cells in rows(table).values():
        *parts, last = cells.values()
        if len(parts) + 1 == len(last.table.columns):
            mean, most = fmean(x.value for x in parts), 2 * last.rounding + 1e-9  # the cells are rounded too
            assert abs(last.value - mean) <= most, last.id
            assert (abs(last.printed - mean) > most) == (last.value != last.printed), last.id
            whole += 1
    assert whole


def test_means_of_categories_are_of_their_tasks():
    """longctx_bench weighs a category by its tasks, all 15; RocketKV leaves passage_count out, which it prints."""
    for cells in rows("longctx-bench:longbench").values():
        if len(cells) == 7:
            *four, retrieval, code, mean = (x.printed for x in cells.values())
            assert mean == pytest.approx((3 * sum(four) + retrieval + 2 * code) / 15, abs=0.011)
    means = {x.row: x.printed for x in find_claims("rocketkv:longbench///avg")}
    for (_, row), cells in rows("rocketkv:longbench-tasks").items():
        assert cells.keys() > {"PCount"}
        others = fmean(x.printed for column, x in cells.items() if column != "PCount")
        assert means[row] == pytest.approx(others, abs=0.1)


def test_errors_of_print_are_recorded_with_what_they_should_be():
    """The four wrong means of PyramidKV's Mistral table, KVMerger's, and RocketKV's twelve tasks over eleven."""
    wrong = {x.id: (x.printed, x.value) for x in CLAIMS if x.printed != x.value}
    mistral = "pyramidkv:longbench/mistral-7b-instruct-v0.2"
    assert {key.removeprefix(f"{mistral}/"): pair for key, pair in wrong.items() if key.startswith(mistral)} == {
        "fullkv/avg.": (39.75, 41.13), "snapkv-2048/avg.": (40.55, 41.55), "streamingllm-128/avg.": (27.57, 27.75),
        "h2o-128/avg.": (34.73, 34.55),
    }
    assert wrong["kvmerger:longbench/llama2-7b-chat/kvmerger-50/avg."] == (35.02, 35.0)
    for cells in rows("rocketkv:scbench").values():
        string, semantic, whole, multi, mean = (x.printed for x in cells.values())
        total = 3 * string + 4 * semantic + 3 * whole + 2 * multi
        assert abs(mean - total / 11) < 0.07
        assert cells["Avg"].value == round(total / 12, 1)


def test_what_is_known_from_memory_says_so():
    """A number's own evidence goes before its table's."""
    evidence = {x.column: x.evidence for x in find_claims("scbench:multi-turn//full-attention")}
    assert evidence == {
        "Retr.String": "secondary", "Retr.Semantic": "memory", "Global": "secondary", "Multi-task": "memory",
        "AVG": "secondary",
    }


@pytest.mark.few(8)
@pytest.mark.parametrize("table", TABLES)
def test_what_can_be_run_is_what_kvbench_takes(table):
    """Every row of every table that kvbench has all of: methods, settings, tasks and protocol are known."""
    seen = set()
    for x in find_claims(table):
        for request in plan_claim(x).requests[:1]:
            kind = (request.method, request.method_settings, request.budget, request.mode, request.generation)
            if kind not in seen and not request.task.startswith(PREFIX):  # these need their data to be looked up
                check(request)
            seen.add(kind)


def test_a_claim_is_found_by_less_of_its_name():
    """An omitted part stands for all, at the end and in the middle."""
    assert len(find_claims("kivi:longbench")) == 96
    assert {x.row for x in find_claims("kivi:longbench//kivi-2")} == {"KIVI-2"}
    assert {x.model for x in find_claims("kivi:longbench//kivi-2")} == {
        "Mistral-7B-Instruct-v0.2", "LongChat-7b-v1.5-32K"
    }


@pytest.mark.parametrize(("claim", "said"), [
    ("snapkw", "unknown paper 'snapkw'. Did you mean 'snapkv'?"),
    ("snapkv:longbanch", "unknown table of snapkv 'longbanch'. Did you mean 'longbench'?"),
    ("snapkv:longbench/mistral", "unknown model of snapkv 'mistral'."),
    ("snapkv:longbench/x", "`kvbench reproduce snapkv:longbench --dry-run` lists its models and rows"),
    ("snapkv:longbench/a/b/c/d", "too many parts"),
    ("snapkv:longbench/漢字/snapkv-1024", "unknown model of snapkv '漢字'."),
    ("snapkv:***", "unknown table of snapkv '***'."),
    ("nowhere.toml:x", "cannot be read"),
])
def test_a_claim_that_is_not_there_is_refused(claim, said):
    """With the nearest name, or what is wrong."""
    with pytest.raises(UserError) as error:
        find_claims(claim)
    assert said in str(error.value)


def check_refused(path: Path, said: str) -> None:
    """The file is refused in one line with these words."""
    with pytest.raises(UserError) as error:
        read_paper(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("old", "new", "said"), [
    ("values.full = [99.0]", "values.full = [99.0, 98.0]", "has 2 numbers for 1 columns"),
    ("values.full = [99.0]", "values.ful = [99.0]", "'ful' of mini is no row of the table"),
    ("values.full = [99.0]", 'values.full = ["99"]', "should be a valid number"),
    ('baseline = "full"', 'baseline = "dense"', "'dense', a baseline, is no row of the table"),
    ('needles = { task = "niah" }', "needles = {}", "names no task"),
    ('evidence = "verified"', 'evidence = "hearsay"', "evidence"),
    ('title = "A paper"', 'titel = "A paper"', "unknown key 'titel'"),
    ('method = "full"', 'method = "full", color = "red"', "is an unknown key"),
    ('id = "mini"', 'id = "mini"\nprotocol.template = "some"', "template"),
    ("SnapKV = { method", '"full +" = { method = "h2o" }\nSnapKV = { method', "'full', 'full +' have the same id"),
    ("SnapKV = { method", '"漢字" = { method = "h2o" }\nSnapKV = { method', "a name of rows has no letter a to z"),
    ("values.full = [99.0]", "values.full = [inf]", "'full' of mini has an infinite number"),
    ('task = "niah"', 'task = "niah", length = [0]', "column 'needles' has a length that is not 1 or more"),
    ('task = "niah"', 'timing = "step"', "names no task"),
])
def test_a_file_that_says_something_else_is_refused(tmp_path, old, new, said):
    """In one line that names the place."""
    path = tmp_path / "paper.toml"
    path.write_text(SHORT)
    assert [x.printed for x in find_claims(f"{path}:scores")] == [99.0, 98.5]
    assert old in SHORT
    path.write_text(SHORT.replace(old, new))
    check_refused(path, said)


@pytest.mark.parametrize(("column", "rest", "said"), [
    ('timing = "step"', "", "column 'needles' needs a length for step timing"),
    ('timing = "step", length = [64, 128]', "", "column 'needles' has several lengths; one number is of one length"),
    ('predicts = "largest batch"', 'gpu = "A100"', "column 'needles' needs a length for largest batch"),
    ('predicts = "longest context"', "", "column 'needles' needs the gpu of the table for longest context"),
    ('predicts = "stored bytes"', "", "column 'needles' needs the gpu of the table for stored bytes"),
    ('timing = "step", length = 64', "batch = 0", "batch"),
])
def test_a_column_says_all_that_its_measurement_needs(tmp_path, column, rest, said):
    """Otherwise it would be found missing in the middle of a command."""
    path = tmp_path / "paper.toml"
    path.write_text(SHORT.replace('task = "niah"', column).replace('baseline = "full"', f'measure = "ms"\n{rest}'))
    check_refused(path, said)


@pytest.mark.parametrize(("batch", "given"), [("nan", "nan"), ("0.0", "0"), ("1.5", "1.5")])
def test_a_printed_speed_is_of_a_whole_batch(tmp_path, batch, given):
    """A batch that no number is printed for may be left open."""
    path = tmp_path / "paper.toml"
    text = SHORT.replace('task = "niah"', 'timing = "step", length = 64').replace('baseline = "full"', 'measure = "ms"')
    path.write_text(text.replace('id = "mini"', f"batch.full = [4.0]\nbatch.SnapKV = [{batch}]"))
    with pytest.raises(UserError, match=f"'SnapKV' of mini has batch {given}, which is no whole number"):
        read_paper(path)
    path.write_text(path.read_text().replace("[98.5]", "[nan]"))
    assert [x.batch for x in find_claims(f"{path}:scores")] == [4]


def test_files_are_named_as_ids_are():
    """A file's name is the paper's part of an id."""
    assert all(path.stem == path.stem.lower() and ":" not in path.stem for path in FOLDER.glob("*.toml"))
