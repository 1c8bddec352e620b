"""The pages of the site, also for runs with hostile content."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
from collections import Counter
from html import escape
from html.parser import HTMLParser
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from kvbench.analysis.formatting import format_bytes
from kvbench.errors import UserError
from kvbench.leaderboard.site.listed import read_listed
from kvbench.leaderboard.submission.archive import MAX_BYTES
from kvbench.leaderboard.submission.records import VERIFICATION, Check
from kvbench.runs.results import TASKS

SCRIPT = "<script>alert(1)</script>"
IMAGE = "\"'><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.links, self.ids, self.text = Counter(), [], set(), ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags[tag, *(name for name, _ in attrs)] += 1
        self.links += [value for name, value in attrs if name in ("href", "src")]
        self.ids |= {value for name, value in attrs if name == "id"}

    def handle_data(self, data):
        self.text += data


def read_pages(folder):
    """All pages of a site."""
    return {x: Page(x) for x in sorted(folder.rglob("*.html"))}


def fill(results):
    """Add a full cache, a method and a failed run of one protocol."""
    results.add("full", "good", method="full", stored=1.0, kind="none")
    results.add("a/b", "poor")

    def fail(result, lines):
        result["score"]["mean"] = result["score"]["ci95"] = None
        result |= {"status": "failed", "error": "out of memory", "n_failed": 1}

    results.add("failed", "good", method="h2o", edit=fail)


def test_rows_can_be_filtered_by_training(results):
    """Where a run was trained on the tasks: its row says so, in words and to the filter; otherwise there is none."""
    fill(results)
    (plain,) = (results.build().folder / "protocols").glob("*.html")
    assert 'name="training"' not in plain.read_text()
    results.add("trained", "good", method="kvzip", edit=lambda result, lines: result["budget"]["resolved"].update(
        trained_on=TASKS
    ))
    text = next((results.build().folder / "protocols").glob("*.html")).read_text()
    assert 'name="training"' in text
    rows = re.findall(r'<tr class="row[^>]*data-training="([^"]*)"[^>]*>.*?html">(\w+)</a>', text, flags=re.DOTALL)
    assert {name: training for training, name in rows} == {
        "full": "not on the tasks", "snapkv": "not on the tasks", "kvzip": "on the tasks",
    }
    assert "not ranked: trained on the tasks&#39; train split" in text


def test_all_links_resolve(results):
    """Pages, anchors and downloads exist, and no page links resources outside the site."""
    fill(results)
    built = results.build()
    pages = read_pages(built.folder)
    assert len(pages) == 6 + 1 + 3 + 3  # also a protocol, three methods and three runs
    for path, page in pages.items():
        for link in page.links:
            if link.startswith("data:"):
                continue
            if link.startswith(("https://arxiv.org/abs/", "https://github.com/")):  # a link that a reader may press
                continue
            target, _, anchor = link.partition("#")
            found = (path.parent / unquote(target)).resolve() if target else path
            assert found.is_file(), (path, link)
            if anchor:
                assert anchor in pages[found].ids, (path, link)


def test_the_command_builds_the_site(results, kvbench, tmp_path):
    """Its numbers are those of the folder, and the page to open is there."""
    fill(results)
    (results.folder / "broken").mkdir()
    (results.folder / "broken" / "result.json").write_text("{}")
    answer = kvbench("leaderboard", "build", results.folder, "-o", tmp_path / "site", "--json")
    assert answer.code == 0
    assert (answer.json["runs"], answer.json["groups"], len(answer.json["problems"])) == (3, 1, 1)
    assert (tmp_path / "site" / "index.html").is_file()
    assert "broken is not shown" in answer.err


def test_the_policy_of_every_page_allows_its_own_script_and_nothing_else(results):
    """By hash, so that a submitted file on the site can never run as a script."""
    fill(results)
    for path in sorted(results.build().folder.rglob("*.html")):
        text = path.read_text()
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
        parts = dict(x.split(" ", 1) for x in policy.split("; "))
        assert parts["default-src"] == "'none'"
        assert parts["style-src"] == "'self' file:"
        for content in re.findall(r"<script>(.*?)</script>", text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert parts["script-src"] == f"'sha256-{digest}'"
        assert "style=" not in text
        assert "<style" not in text


def read_protocol(folder):
    """The only page of a protocol."""
    (path,) = folder.glob("protocols/*.html")
    return Page(path)


def write_everywhere(results, text):
    """Add a run with this text in every field that a submitter controls, and one whose method has this name."""
    def write(result, lines):
        method, card = result["method"], result["method"]["card"]
        result["suite"] = result["spec"]["suite"] = result["spec"]["budget"] = text
        method |= {"settings": {text: text}, "family": text, "version": text}
        card |= dict.fromkeys(("title", "idea", "arxiv", "paper_budget", "family"), text)
        card |= {key: [text] for key in ("deviations", "unverified", "limits", "stages")}
        card["upstream"] = {"repo": text, "commit": text, "license": text}
        result["model"] |= {"id": text, "dtype": text}
        result["task"] |= {"name": text, "suite": text, "scorer": text, "prompt_id": text}
        result["budget"] = {"asked": text, "kind": text, "resolved": {text: text}}
        result["score"]["metric"] = text
        result["scores"] = {text: 0.5, "b": 0.5}
        result["output"]["stop_reasons"] = result["effect"]["facts"] = {text: 1}
        result["kernels"] |= {"implementation": text, "ops": [text]}
        result["environment"] |= dict.fromkeys(("python", "torch", "cpu", "gpu", "started"), text)
        for x in lines:
            x |= {"prediction": text, "references": [text], "stop_reason": text}

    results.add(f"x{text.replace('/', '')}", method=text, edit=write)
    results.add("y", method=text)


@pytest.mark.few
@pytest.mark.parametrize("text", [SCRIPT, IMAGE, "{{ 7 * 7 }}", f"</title></style>{SCRIPT}", f"</script>{SCRIPT}"])
def test_submitted_text_is_escaped(results, make_results, text):
    """Tags and attributes are the same as for a harmless text."""
    found = []
    for folder, said in ((make_results("other"), "innocent"), (results, text)):
        fill(folder)
        write_everywhere(folder, said)
        pages = read_pages(folder.build().folder).values()
        assert sum(said in x.text for x in pages) == 7  # index, methods, the method, its two protocols and runs
        tags = sum((x.tags for x in pages), Counter())
        found.append((set(tags), tags["script",]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("contexts", "scores", "words"),
    [
        (1, [0.0], "p 1.000: 1 context is too few to tell"),
        (5, [0.0], "p 0.062: 5 contexts are too few to tell"),
        (12, [1.0, 0.0], "p 1.000: not significant with 12 contexts, adjusted for the number of rows"),
    ],
)
def test_an_insignificant_difference_is_labeled_as_such(results, contexts, scores, words):
    """With five contexts no difference can be significant, however large it is."""
    results.add("full", [[1.0]] * contexts, method="full", stored=1.0, kind="none")
    results.add("a", [[scores[-1]], *[[scores[0]]] * (contexts - 1)])
    folder = results.build().folder
    text = " ".join(Page(next(folder.glob("runs/snapkv-*/index.html"))).text.split())
    assert " against the full cache" in text
    assert words in text


def test_headings_show_generation_settings(results):
    def limit(result, lines):
        generation = result["spec"]["generation"]
        generation.pop("limit", None)
        generation["max_new_tokens"] = 7

    results.add("a")
    results.add("b", edit=limit)
    texts = [Page(x).text for x in results.build().folder.glob("protocols/*.html")]
    assert sorted("max_new_tokens 7" in x and "first question visible, " in x for x in texts) == [False, True]


def test_a_submission_shows_its_submitter(results):
    """Row and page show the submitter, the page also the tuning data; the manifest can be downloaded."""
    results.send(results.add("a"), "ada")
    folder = results.build().folder
    assert "10% by ada" in read_protocol(folder).text
    run = next(folder.glob("runs/*.ada/index.html"))
    assert "Submitted by ada, settings chosen on niah:dev." in " ".join(Page(run).text.split())
    assert sorted(x.name for x in run.parent.iterdir()) == [
        "index.html", "manifest.json", "result.json", "samples.jsonl.gz", "spec.json"
    ]


def test_a_run_without_a_manifest_is_not_called_curated(results):
    """It may be of anyone."""
    results.add("a", verified=False)
    (run,) = results.build().folder.glob("runs/*/index.html")
    text = " ".join(Page(run).text.split())
    assert "Not a submission: it has no manifest." in text and "curated" not in text.lower()


def test_the_page_of_a_quantized_cache_shows_what_its_shares_refer_to(results):
    """16 bits, where the model computes in 32."""
    def widen(result, lines):
        result["method"]["family"] = result["method"]["card"]["family"] = "quantization"
        result["model"]["dtype"] = "float32"
        result["memory"] |= {"full_bytes": 4_000_000, "stored_bytes": 500_000}

    results.add("a", method="kivi", kind="bits", edit=widen)
    (run,) = results.build().folder.glob("runs/*/index.html")
    text = Page(run).text
    assert f"full cache in 16 bits, to which the shares refer{format_bytes(2_000_000)}" in text
    assert f"{format_bytes(500_000)}25.0%" in text


def test_a_submitters_links_are_on_the_board_and_in_the_exports(results):
    """Row, run page, JSON and Parquet have them; no search engine counts them, and no other row has any."""
    links = {"code_url": "https://example.org/code?a=1&b=2#c", "paper_url": "https://arxiv.org/abs/2404.14469"}
    results.send(results.add("a"), "ada", **links)
    results.add("b", "good")
    folder = results.build().folder
    run, = folder.glob("runs/*.ada/index.html")
    protocol, = folder.glob("protocols/*.html")
    anchor = re.compile(r'<a href="(https://[^"]*)" rel="nofollow noreferrer ugc" [^>]*>(\w+)</a>')
    for page in (run, protocol):
        assert anchor.findall(page.read_text()) == [(escape(links["code_url"]), "code"), (links["paper_url"], "paper")]
    rows = json.loads((folder / "results.json").read_text())["runs"]
    stated = {x["submitter"]: (x["code_url"], x["paper_url"]) for x in rows}
    assert stated == {"ada": tuple(links.values()), None: (None, None)}


def test_invisible_characters_are_escaped(results):
    """Characters that reverse text, and names that imitate others."""
    results.add("a", method="snap\u202ekv\u200b")
    results.add("c", method="SnapKV")
    results.add("b", edit=lambda result, lines: result["method"].update(family="evic\u202etion"))
    page = read_pages(results.build().folder)
    index = next(x for path, x in page.items() if path.name == "index.html" and path.parent.name == "site")
    assert "its name 'snap\\u202ekv\\u200b' is not printable ASCII" in index.text
    assert "its name 'SnapKV' can be taken for the registered method snapkv" in index.text
    assert "\u202e" not in index.text
    assert index.text.count("evic\\u202etion") >= 1


def test_control_characters_are_spelled_out(results):
    """In the charts, the answers and the tables."""
    def write(result, lines):
        result["method"]["settings"]["pool"] = result["score"]["metric"] = "a\x01b"

    results.add("a", edit=write)
    results.add("b")
    folder = results.build().folder
    for page in (folder / "index.html", *folder.glob("protocols/*.html")):
        assert "\x01" not in page.read_text()
        assert "pool=a\\x01b" in Page(page).text


def test_a_run_page_shows_its_worst_answers_first(results):
    """The contexts with the worst scores, then the first ones."""
    scores = [[1.0, 1.0]] * 8 + [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    results.add("a", scores, edit=lambda result, lines: [x.update(prediction=f"said {x['index']}.") for x in lines])
    text = Page(next(results.build().folder.glob("runs/*/index.html"))).text
    assert list(dict.fromkeys(re.findall(r"said (\d+)\.", text))) == ["9", "8", "0", "1", "2"]
    assert "5 of 11, worst first" in text


@pytest.mark.parametrize(("kept", "tables", "words"), [([8.0, 8.0], 0, "in every layer"), ([4.0, 12.0], 1, "mean")])
def test_entries_are_listed_by_layer_where_layers_differ(results, kept, tables, words):
    """Layers of equal numbers share one line."""
    results.add("a", edit=lambda result, lines: result["effect"].update(entries_kept_by_layer=kept, entries_kept=8.0))
    (path,) = results.build().folder.glob("runs/*/index.html")
    text = path.read_text()
    assert text.count('aria-label="Entries by layer"') == tables
    assert f"entries kept, {words}" in text


def test_long_values_are_cut_with_a_note(results):
    """Long fields do not make long pages."""
    results.add("a", method="mine", edit=lambda result, lines: result["method"]["card"].update(idea="x" * 300_000))
    assert "298,000 more characters" in Page(results.build().folder / "methods" / "mine.html").text


def test_invalid_folders_are_listed_and_others_built(results):
    """Each is listed with its reason."""
    fill(results)
    bad = {
        "cut": ("result.json", '{"schema_version": 1, "run'), "empty": ("samples.jsonl", ""),
        "lines": ("samples.jsonl", "[1, 2]\n"), "unfinished": ("result.json", None), "list": ("spec.json", "[]"),
        "huge": ("result.json", '{"schema_version": 1e999}'), "twice": ("spec.json", '{"a": 1, "a": 2}'),
    }
    for name, (file, content) in bad.items():
        path = results.add(name, method=name) / file
        path.unlink()
        if content is not None:
            path.write_text(content)
    results.add("copied")
    built = results.build()
    assert built.runs == 3
    assert [x.place for x in built.problems] == sorted([*bad, "copied"])
    text = Page(built.folder / "index.html").text
    for x in built.problems:
        assert x.reason in text


@pytest.mark.parametrize("genuine", ["first", "second"])
def test_a_verified_run_is_listed_in_place_of_its_copy(results, genuine):
    """Whichever folder comes first by name; the copy, which states a later start, is listed with the reason."""
    def forge(result, lines):
        result["environment"]["started"] = "2099-01-01T00:00:00+00:00"

    copy = {"first": "second", "second": "first"}[genuine]
    results.add(genuine)
    results.add(copy, verified=False, edit=forge)
    runs, problems = read_listed(results.folder)
    assert [x.place for x in runs] == [genuine]
    assert [(x.place, x.reason) for x in problems] == [(copy, f"the same run as '{genuine}'")]


def test_invalid_verification_files_exclude_the_run(results, monkeypatch):
    """Links to endless files and pipes without a writer do not block the build."""
    fill(results)
    monkeypatch.setitem(MAX_BYTES, VERIFICATION, 1 << 10)
    paths = [results.add(x, method=x, verified=False) / VERIFICATION for x in ("large", "link", "pipe", "text")]
    paths[0].write_bytes(b" " * (1 << 11))
    paths[1].symlink_to("/dev/zero")
    os.mkfifo(paths[2])
    paths[3].write_text("{")
    built = results.build()
    assert (built.runs, [x.place for x in built.problems]) == (3, ["large", "link", "pipe", "text"])


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", [1e300, -1, True, 10**400], ids=["real", "negative", "bool", "whole"])
def test_an_invalid_depth_gives_no_heat_map(results, depth):
    """The run keeps its page, without a heat map."""
    def place(result, lines):
        for x in lines:
            x["facts"] = {"length": 1024, "depth": 10}
        lines[-2]["facts"]["depth"] = depth

    results.add("a", edit=place)
    built = results.build()
    assert built.runs == 1
    assert "By depth and length" not in next(built.folder.glob("runs/*/index.html")).read_text()


def test_a_mean_that_contradicts_the_answers_is_not_shown(results):
    """Otherwise rank and shown score could disagree."""
    results.add("a", edit=lambda result, lines: result["score"].update(mean=0.99))
    built = results.build()
    assert built.runs == 0
    assert built.problems[0].reason == "its mean is 0.99, which is not the mean of its 24 scored answers"


def test_badges_apply_to_the_verified_files_only(results):
    """Shows level and flags; ignores records of other files; hides refused runs."""
    flag = Check(name="machine", outcome="flag", reason="from no commit")
    refused = Check(name="bytes", outcome="refused", reason="a full cache is smaller")
    results.verify(results.add("a"), "L1", flag)
    results.verify(results.add("b", method="h2o"), "L2", content="0" * 64)
    results.verify(results.add("c", method="tova"), None, refused)
    built = results.build()
    pages = {x.parent.name: Page(x) for x in built.folder.glob("runs/*/index.html")}
    snapkv, h2o = (next(x for name, x in pages.items() if name.startswith(method)) for method in ("snapkv", "h2o"))
    assert "L1: a random share of its samples rerun" in snapkv.text
    assert "from no commit" in snapkv.text
    assert "These files have not been verified" in h2o.text
    assert [x.reason for x in built.problems] == ["refused by its verification: a full cache is smaller"]


def test_a_refusal_of_other_files_hides_nothing(results):
    """Such as those before a correction."""
    results.verify(
        results.add("a"), None, Check(name="bytes", outcome="refused", reason="a full cache is smaller"),
        content="0" * 64,
    )
    assert (results.build().runs, results.build().problems) == (1, ())


def test_verified_runs_show_the_verifiers_score(results):
    """The verifier's interval replaces the submitted one."""
    folder = results.add("a")
    results.verify(folder, "L0", interval=(0.4, 0.625))
    folder = results.build().folder
    assert json.loads((folder / "results.json").read_text())["runs"][0]["score_ci95"] == [0.4, 0.625]


def test_tables_of_bundled_models_carry_a_note(results):
    """On the index and the methods' pages; tables of other models have none."""
    fill(results)
    results.add("other", edit=lambda result, lines: result["model"].update(id="big", sha256="0" * 64))
    folder = results.build().folder
    texts = [Page(x).text for x in folder.glob("protocols/*.html")]
    assert sorted("says nothing about 8B models" in x for x in texts) == [False, True]
    assert "says nothing about 8B models" in Page(folder / "methods" / "full.html").text


def test_exports_have_one_row_per_run(results):
    """JSON and Parquet agree; a failed run has neither score nor rank."""
    fill(results)
    folder = results.build().folder
    rows = json.loads((folder / "results.json").read_text())["runs"]
    assert pq.read_table(folder / "results.parquet").to_pylist() == rows
    assert {x["method"]: (x["score"], x["rank"], x["axis"], x["band"]) for x in rows} == {
        "full": (1.0, None, None, None), "snapkv": (0.5, 1, "stored", "stored: 15% to 30% of the full cache"),
        "h2o": (None, None, None, None),
    }
    assert all((folder / x["page"]).is_file() for x in rows)


def test_the_same_runs_give_the_same_bytes(results):
    """Pages do not contain the time of building."""
    fill(results)
    contents = []
    for _ in range(2):
        folder = results.build().folder
        contents.append({x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()})
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_chart_points_link_to_their_runs(results):
    """One panel per family and axis; each point has its label, and the full cache is a line."""
    fill(results)
    results.add("quest", "good", method="quest", stored=1.05, kind="read")
    folder = results.build().folder
    (page,) = folder.glob("protocols/*.html")
    links = re.findall(r'<a href="../(runs/[^"]*)" tabindex="-1" aria-label="([^"]*): ([^"]*)"', page.read_text())
    assert sorted(links, key=lambda x: x[1])[::2] == sorted(links, key=lambda x: x[1])[1::2]  # on both axes
    assert {(name, score) for _, name, score in links} == {("quest 10%", "1.000"), ("snapkv 10%", "0.500")}
    assert all(x.startswith(f"runs/{name.split()[0]}-") for x, name, _ in links)
    assert page.read_text().count('<path class="full"') == 2  # both methods are of one template, so of one family


@pytest.mark.slow
def test_a_build_replaces_the_old_site(results):
    """Removed runs disappear, and no temporary files remain."""
    fill(results)
    folder = results.build().folder
    for x in (results.folder / "failed").iterdir():
        x.unlink()
    assert len(list(folder.glob("runs/*"))) == 3
    results.build()
    assert len(list(folder.glob("runs/*"))) == 2
    assert sorted(x.name for x in folder.parent.iterdir()) == ["results", "site"]


def test_other_folders_are_never_replaced(results):
    """A folder with other files, a link, and a folder that contains the results."""
    site = results.folder.with_name("site")
    site.mkdir()
    (site / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="is not empty and is not a site of kvbench"):
        results.build()
    assert (site / "thesis.tex").read_text() == "years"
    (site / "thesis.tex").unlink()
    site.rmdir()
    site.symlink_to(results.folder)
    with pytest.raises(UserError, match="contain one another"):
        results.build()


def test_a_site_folder_that_cannot_be_made_names_the_option_of_the_command(kvbench, results):
    """It is -o, not the --out of a run; also where the system reports the parent as writable."""
    results.add("mine")
    done = kvbench("leaderboard", "build", results.folder, "-o", "/proc/foo")
    assert (done.code, "cannot be created: " in done.err, "Give another -o." in done.err) == (2, True, True)


def test_a_site_without_a_verified_run_says_why_it_names_no_technique(results):
    """With the command that verifies."""
    results.add("mine", verified=False)
    assert "no run of a technique of kvbench is verified" in Page(results.build().folder / "index.html").text
    results.add("full", method="full")
    assert "is verified" not in Page(results.build().folder / "index.html").text


def test_protocols_that_differ_in_the_conversation_have_different_headings(results):
    """Own answers as history, or compression at every turn."""
    def change(history, recompress):
        def edit(result, _):
            result["spec"] |= {"recompress": recompress}
            result["history"] = result["spec"]["history"] = history
        return edit

    for i, (history, recompress) in enumerate([("reference", False), ("own", False), ("reference", True)]):
        results.add(f"run-{i}", edit=change(history, recompress))
    text = Page(results.build().folder / "index.html").text
    assert "own history" in text and "recompressed at each turn" in text


def test_an_empty_leaderboard_is_built(results):
    """It explains how to submit."""
    built = results.build()
    assert built.runs == 0
    assert "There are no runs yet" in Page(built.folder / "index.html").text


VALUES = (None, 0, -1, 1, 2**53, -(2**53), 0.5, 1e-300, 1e15, -0.0, "", "x", "\u202e", [], {})


def find_places(document, at=()):
    """The path of every value in a document, containers included."""
    if at:
        yield at
    if isinstance(document, dict | list):
        keys = document if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield from find_places(document[key], (*at, key))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_mutated_runs_never_break_the_build(results, seed):
    """With up to four values replaced, the run is shown or listed as a problem, and the other run is shown."""
    draw = random.Random(seed)

    def spoil(result, lines):
        for _ in range(draw.randint(1, 4)):
            document = draw.choice([result, result, draw.choice(lines)])
            *way, last = draw.choice([x for x in find_places(document) if x[0] != "spec"])
            for key in way:
                document = document[key]
            same = [x for x in VALUES if type(x) is type(document[last])]
            document[last] = draw.choice(same if same and draw.random() < 0.9 else VALUES)

    results.add("good", "good", method="full", stored=1.0, kind="none")
    try:
        results.add("spoilt", edit=spoil)
    except ValidationError:
        pytest.skip("no run has such a spec")
    built = results.build()
    assert built.runs + len(built.problems) == 2
    assert [x.place for x in built.problems] == ["spoilt"][: len(built.problems)]
    assert any(x.name.startswith("full-") for x in built.folder.glob("runs/*"))


def test_rows_name_what_happened_before_a_run(results):
    """Calibration, training on another text, or training on the tasks; the method's page has the words of its card.

    The cards of older results lack calibration: then the registered one says it. LouisKV with a given threshold has
    none.
    """
    words = {
        "snapkv": None, "qfilter": "query directions, in one pass", "kvzap": "a predictor, trained on a manual",
        "locret": "heads, trained", "razor-attention": "not written yet", "louiskv": None,
    }

    def prepare(calibration):
        def edit(result, lines):
            result["method"]["card"]["calibration"] = calibration
            if calibration == words["razor-attention"]:
                del result["method"]["card"]["calibration"]
            if calibration == words["locret"]:
                result["budget"]["resolved"]["trained_on"] = TASKS
        return edit

    results.add("full", "good", method="full", stored=1.0, kind="none")
    for method, calibration in words.items():
        results.add(method, "poor", method=method, edit=prepare(calibration))
    folder = results.build().folder
    (protocol,) = (folder / "protocols").glob("*.html")
    said = {
        name: re.findall(r"\((calibrated|trained [^)]*)\)", label) for name, label in
        re.findall(r'html">([\w-]+)</a> <span class="quiet">(.*?)</span></th>', protocol.read_text(), flags=re.DOTALL)
    }
    assert said == {
        "full": [], "snapkv": [], "qfilter": ["calibrated"], "kvzap": ["trained on another text"],
        "locret": ["trained on the tasks"], "razor-attention": ["calibrated"], "louiskv": [],
    }
    page = (folder / "methods" / "kvzap.html").read_text()
    assert words["kvzap"] in page


def test_pages_of_methods_are_short(results):
    """Runs of several protocols are folded, with their scores; the full cache has no charts."""
    for length in (512, 1024):
        def set_length(result, lines, length=length):
            result["task"]["length"] = result["spec"]["task"]["length"] = length

        results.add(f"full-{length}", "good", method="full", stored=1.0, kind="none", edit=set_length)
        results.add(f"snapkv-{length}", "poor", edit=set_length)
    folder = results.build().folder / "methods"
    full, snapkv = ((folder / f"{x}.html").read_text() for x in ("full", "snapkv"))
    for page in (full, snapkv):
        heads = re.findall(r"<details>\s*<summary>(.*?)</summary>", page)
        assert len(heads) == 2 and "512 tokens" in heads[0] and all(": 1 run, " in x for x in heads)
    assert "<svg viewBox" in snapkv and "<svg viewBox" not in full


def test_a_run_whose_lines_have_no_schema_version_is_not_shown(results):
    results.add("bare", edit=lambda _, lines: lines[3].pop("schema_version"))
    _, problems = read_listed(results.folder)
    assert [x.reason for x in problems] == ["a line is invalid: no schema_version"]


def test_of_the_facts_only_the_place_of_a_needle_is_kept(results):
    """Submitted facts may be large, and hundreds of runs are read."""
    facts = {"length": 1024, "depth": 50.0, "logprobs": [[-1.0] * 100], "keys": ["x"]}
    results.add("a", edit=lambda _, lines: [x.update(facts=facts) for x in lines])
    other = {"length": [1] * 100, "depth": "x"}
    results.add("b", method="knorm", edit=lambda _, lines: [x.update(facts=other) for x in lines])
    results.add("c", method="h2o", edit=lambda _, lines: [x.update(facts={"a": [1] * 200_000}) for x in lines])
    runs, problems = read_listed(results.folder)
    kept = {x.place: [y.facts for y in x.run.lines.values()] for x in runs}
    assert kept == {"a": [{"length": 1024, "depth": 50.0}] * 24, "b": [{}] * 24}
    assert [x.reason for x in problems] == ["samples.jsonl: more than 100,000 values"]


def test_of_equal_submissions_the_one_with_the_higher_level_counts(results):
    """A run states the time of its start itself."""
    for name, level, started in (("a", "L2", "2026-01-01"), ("b", "L0", "9999-01-01"), ("c", "L1", "2026-01-02")):
        def begin(result, _, started=started):
            result["environment"]["started"] = f"{started}T00:00:00+00:00"

        folder = results.add(name, edit=begin, verified=False)
        results.send(folder, "ada")
        results.verify(folder, level)
    runs, _ = read_listed(results.folder)
    assert [x.place for x in runs] == ["a"]
