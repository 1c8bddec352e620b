"""The site in Debian's chromium, opened from disk and driven by Playwright."""

from __future__ import annotations

import itertools
import re
import shutil

import pytest

from kvbench.leaderboard.site.build import build_site
from kvbench.leaderboard.site.listed import read_listed
from kvbench.report.group import Axis
from kvbench.report.suggest import Guide, group_protocols
from kvbench.report.suggestion import Question, describe_standing
from kvbench.task import Mode

from .conftest import CURATED

CHROMIUM = shutil.which("chromium")
HOSTILE = "\"'></title><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")]


@pytest.fixture(scope="module")
def browser():
    """One browser for all tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def site(results):
    """Two protocols, methods with stored and read budgets, and a hostile name."""
    results.add("full", "good", method="full", stored=1.0, kind="none")
    results.add("a", "poor", stored=0.1)
    results.add("b", "good", method="kvzip", stored=0.101)
    results.add("c", "bad", method="h2o", stored=0.104)
    results.add("d", "good", method="quest", stored=1.05, kind="read")

    def hide(result, lines):
        result["visibility"] = "hidden"

    results.add("e", "bad", edit=hide)

    def attack(result, lines):
        hide(result, lines)
        result["method"]["family"] = HOSTILE
        for x in lines:
            x["prediction"] = HOSTILE

    results.add("f", "poor", method=HOSTILE, edit=attack)
    return results.build().folder


def watch(browser, folder, **options):
    """The first page of a site. Console errors and requests outside the site fail the test at its end."""
    context = browser.new_context(**options)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / "index.html").as_uri())
    yield page
    context.close()
    assert said == []
    assert [x for x in asked if not x.startswith((folder.as_uri(), "data:"))] == []


@pytest.fixture
def page(browser, site):
    """The first page on a wide screen."""
    yield from watch(browser, site, viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="module")
def curated(tmp_path_factory):
    """The site of the curated results."""
    return build_site(CURATED.parent, tmp_path_factory.mktemp("curated") / "site").folder


@pytest.fixture(scope="module")
def guide():
    """The answers of `kvbench suggest` from the runs that the site ranks: those with verified answers and bytes."""
    runs, _ = read_listed(CURATED.parent)
    return Guide(group_protocols(x.run for x in runs if x.counted))


def visible_methods(page):
    """Method names of the visible rows, in order."""
    return page.locator("tr.row:visible th[scope=row] a").all_inner_texts()


def open_protocol(page, name):
    """Follow a link to a protocol."""
    page.locator("#protocols").get_by_role("link", name=name).click()


@pytest.mark.parametrize(
    ("question", "choices"),
    [
        (Question("smollm2-135m-q4_1", Mode.SINGLE, Axis.STORED, 0.25), {}),
        (Question("mini", Mode.MULTI_TURN, Axis.STORED, 0.25), {"Model": "mini"}),
        (Question("mini", Mode.MULTI_TURN, Axis.STORED, 0.1, visibility="hidden"), {
            "Model": "mini", "At most": "10 % stored", "Turns": "multi-turn, question hidden",
        }),
        (Question("mini", Mode.MULTI_TURN, Axis.READ, 0.25), {"Model": "mini", "At most": "25 % read"}),
        (Question("mini", Mode.MULTI_TURN, Axis.STORED, 0.05), {"Model": "mini", "At most": "5 % stored"}),
        (Question("mini-diffusion", Mode.SINGLE, Axis.COMPUTED, 0.5, task="list-copy"), {
            "Model": "mini-diffusion", "At most": "50 % computed", "Task": "list-copy",
        }),
    ],
)
def test_the_best_technique_is_found_in_as_many_clicks_as_choices(browser, curated, guide, question, choices):
    """Of each model, the page starts with the turns of the most runs; every answer is that of `kvbench suggest`."""
    for page in watch(browser, curated, viewport={"width": 1280, "height": 900}):
        for label, option in choices.items():
            page.get_by_label(label).select_option(option)
        answer = guide.answer(question)
        assert page.locator("#verdict").inner_text() == answer.verdict
        shown = page.locator(".technique")
        assert shown.count() == len(answer.shown)
        for i, technique in enumerate(answer.shown):
            assert shown.nth(i).locator("h3 a").inner_text() == technique.label
            scores = shown.nth(i).locator("[data-field=score]").all_inner_texts()
            assert sorted(scores) == sorted(describe_standing(x)["score"] for x in technique.standings)
        order = page.locator(".summary:visible tbody:last-child tr:visible").evaluate_all(
            "rows => rows.map(x => x.dataset.label)"
        )
        assert order == [x.label for x in answer.techniques]
        assert page.locator(".summary:visible tr.full").is_visible()
        empty = page.locator(".summary:visible table").evaluate("""table => [...table.tHead.rows[0].cells].slice(1)
            .filter(head => head.offsetParent && ![...table.tBodies[1].rows].some(row => row.offsetParent
                && row.cells[head.cellIndex].querySelector(".cell:not([hidden])")))""")
        assert empty == []


def test_the_answer_links_to_its_evidence(browser, curated):
    """From the score to the run, from the questions to the protocol, from the name to the method."""
    for page in watch(browser, curated):
        page.get_by_label("Model").select_option("mini")
        first = page.locator(".technique").first
        label, score = first.locator("h3 a").inner_text(), first.locator("[data-field=score]").first.inner_text()
        method = label.split()[0]  # settings follow, and the version where runs of several are curated
        first.locator("[data-field=score]").first.click()
        assert page.locator("h1").inner_text().startswith(method)
        assert page.locator(".big").first.inner_text() == score
        page.go_back()
        page.locator(".technique [data-field=protocol]").first.click()
        assert "mini in bfloat16; 40 contexts" in page.locator("main").inner_text()
        page.go_back()
        page.locator(".technique h3 a").first.click()
        assert page.locator("h1").inner_text() == method
        assert page.locator(".panel").count() >= 4  # every protocol of mini


def test_no_page_is_larger_than_two_megabytes(curated):
    """And a curve's color and marker are its own within its panel, so that color is not the only mark."""
    pages = list(curated.rglob("*.html"))
    assert max(x.stat().st_size for x in pages) < 2_000_000
    for path in curated.glob("protocols/*.html"):
        for panel in re.findall(r'<figure class="panel".*?</figure>', path.read_text(), re.DOTALL):
            curves = re.findall(r'<g class="curve (s\d)".*?<path class="dot"[^>]* d="([^"]*)"', panel, re.DOTALL)
            assert len(curves) == len(set(curves)) > 0


def test_labels_of_a_panel_do_not_overlap(browser, curated):
    """On every protocol's page."""
    for page in watch(browser, curated, viewport={"width": 1280, "height": 900}):
        for path in curated.glob("protocols/*.html"):
            page.goto(path.as_uri())
            crowded = page.evaluate("""[...document.querySelectorAll("figure.panel")].filter(panel => {
                const boxes = [...panel.querySelectorAll(".name")].map(x => x.getBoundingClientRect());
                const edge = panel.getBoundingClientRect().right;
                boxes.sort((a, b) => a.top - b.top);
                return boxes.some((x, i) => x.right > edge + 1 || (i && x.top < boxes[i - 1].bottom - 3));
            }).length""")
            assert crowded == 0


def test_the_question_and_the_filters_are_in_the_address(page):
    """Which restores the view; options without a run cannot be chosen."""
    assert page.locator("#verdict").inner_text().startswith("kvzip is best under one protocol;")
    assert page.get_by_label("Turns").evaluate("x => [...x.options].map(y => y.text)") == [
        "multi-turn", "multi-turn, first question visible", "multi-turn, question hidden"
    ]
    page.get_by_label("Turns").select_option("multi-turn, question hidden")
    page.get_by_label("Find").fill("snap")
    assert visible_methods(page) == ["snapkv"]
    assert "turns=multi-turn%2C+question+hidden" in page.url
    other = page.context.new_page()
    other.goto(page.url)
    assert other.locator("#verdict").inner_text() == page.locator("#verdict").inner_text()
    assert visible_methods(other) == ["snapkv"]
    other.close()
    page.get_by_label("Find").fill("no such method")
    assert visible_methods(page) == []
    assert page.locator("tr.full").is_visible()
    page.get_by_role("button", name="Reset").click()
    page.locator(".matrix tbody:last-child tr:visible").wait_for()
    assert visible_methods(page) == ["snapkv"]


def test_filters_act_on_charts_and_rows(page):
    """A family or text hides other panels, curves and rows; the full cache stays in every table."""
    open_protocol(page, "first question visible")
    assert page.locator("#shown").inner_text().startswith("5 of 5 runs.")
    curves = page.locator(".panel:visible .curve:visible")
    assert curves.count() == 8  # four methods on two axes
    page.get_by_label("Find").fill("kvzip")
    assert visible_methods(page) == ["full", "kvzip", "full"]
    assert curves.count() == 2
    assert page.url.endswith("#find=kvzip")
    page.get_by_label("Find").fill("no such method")
    assert visible_methods(page) == ["full", "full"]
    assert page.locator(".panel:visible").count() == 0
    page.get_by_role("button", name="Show all").click()
    page.get_by_text("5 of 5 runs.").wait_for()
    assert "#" not in page.url


def test_sorting_stays_within_a_band(page):
    """Three clicks: two orders, then the initial one. The full cache stays first."""
    open_protocol(page, "first question visible")
    table = page.locator("table.rows:visible").first
    names = table.locator("tr.row th[scope=row] a")
    button = table.get_by_role("button", name="Stored")
    head = table.locator("thead th", has=page.get_by_role("button", name="Stored"))
    assert names.all_inner_texts() == ["full", "kvzip", "snapkv", "h2o"]
    button.click()
    assert (head.get_attribute("aria-sort"), names.all_inner_texts()) == (
        "ascending", ["full", "snapkv", "kvzip", "h2o"]
    )
    button.click()
    assert (head.get_attribute("aria-sort"), names.all_inner_texts()) == (
        "descending", ["full", "h2o", "kvzip", "snapkv"]
    )
    button.click()
    assert (head.get_attribute("aria-sort"), names.all_inner_texts()) == ("none", ["full", "kvzip", "snapkv", "h2o"])


def test_the_summary_is_sorted_by_the_score_that_it_shows(page):
    """The full cache stays first; another limit restores the order of the answer."""
    page.get_by_label("Turns").select_option("multi-turn, first question visible")
    head = page.get_by_role("button", name="Technique")
    head.click()
    assert visible_methods(page) == ["h2o", "kvzip", "snapkv"]
    page.locator("thead button:visible").nth(1).click()
    assert visible_methods(page)[0] == "kvzip"
    page.get_by_label("At most").select_option("50 % stored")
    assert visible_methods(page) == ["kvzip", "snapkv", "h2o"]


def test_everything_is_reached_by_keyboard(page):
    """The skip link, the question, the filters and a sorting head have a name and a visible focus."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_label("At most").focus()
    page.keyboard.press("ArrowUp")  # from 25 % to 10 %
    assert "limit=stored-10" in page.url
    page.locator("table.rows:visible thead button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    unnamed = page.evaluate("[...document.querySelectorAll('select, input, button, a, [tabindex]')].filter("
                            "x => !(x.labels?.length || x.textContent.trim() || x.ariaLabel)).length")
    assert unnamed == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_screen_readers_get_headings_tables_and_changes(browser, site, width):
    """On both layouts: no heading level is skipped, each cell has its row, and changes are announced."""
    for page in watch(browser, site, viewport={"width": width, "height": 844}):
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].filter(x => x.checkVisibility())"
                               ".map(x => Number(x.tagName[1]))")
        assert levels[0] == 1
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
        assert page.get_by_role("status").count() == 2  # the verdict, and the count of techniques
        table = page.get_by_role("region", name="Techniques on mini").get_by_role("table")
        assert table.get_by_role("row").count() == 5  # head, full cache, three techniques
        assert table.get_by_role("rowheader").count() == 4
        assert page.locator(".technique .led").first.text_content().strip("\u25cf ") == "best or tied"


def test_links_lead_to_methods_runs_and_files(page, site):
    """Links lead from the first page to a method, to a run, and to its files."""
    page.get_by_role("link", name="kvzip", exact=True).first.click()
    assert page.locator("h1").inner_text() == "kvzip"
    assert page.locator(".panel .curve a").count() == 1
    page.get_by_role("link", name="Run of kvzip").last.click()
    assert page.locator("h1").inner_text().startswith("kvzip")
    page.get_by_role("link", name="result.json").click()
    page.wait_for_url("**/result.json")
    run = next(site.glob("runs/kvzip-*"))
    assert page.locator("pre").inner_text() == (run / "result.json").read_text()


def test_hostile_names_are_escaped(page, site):
    """No script of a name runs on any page."""
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.locator("img").count() == 0
        assert page.title().endswith("kvbench")
    page.goto((site / "index.html").as_uri())
    open_protocol(page, "question hidden")
    page.get_by_label("Family").select_option(HOSTILE)
    assert visible_methods(page) == [HOSTILE]


def test_a_hostile_label_cannot_leave_the_answers(results, browser):
    """Settings of a ranked run come from its submitter; the script shows them as text."""
    results.add("full", "good", method="full", stored=1.0, kind="none")
    results.add("a", "good", edit=lambda result, lines: result["model"].update(
        id=f"</script>{HOSTILE}", sha256="0" * 64,
    ))
    results.add("b", "poor", edit=lambda result, lines: result["method"]["settings"].update(pool=f"</script>{HOSTILE}"))
    for page in watch(browser, results.build().folder):
        assert page.title().endswith("kvbench")
        assert page.locator("img").count() == 0
        page.get_by_label("Model").select_option("mini")
        assert HOSTILE in page.locator("#best").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_narrow_screen(browser, site, scheme):
    """At 390 pixels no page scrolls sideways, and on the first page no table does."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    page.goto((site / "index.html").as_uri())
    assert page.evaluate("[...document.querySelectorAll('main *')].filter("
                         "x => !x.closest('.hide, thead') && x.getBoundingClientRect().right > 391).length") == 0
    page.locator("#protocols a").first.click()
    heads = page.locator("table.rows").first.locator("thead th:visible").all_inner_texts()
    assert [x.split()[0] for x in heads] == ["Rank", "Method", "Stored", "Score", "Run"]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(253, 253, 252)", "dark": "rgb(20, 23, 26)"}[scheme]
    context.close()


def test_pages_work_without_scripts(browser, site):
    """The tables show every run; only choosing, filters and sorting are missing."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert visible_methods(page) == ["h2o", "kvzip", "quest", "snapkv"]
    assert page.locator(".matrix .cell:visible").count() == 6  # five ranked runs and the full cache
    assert not page.locator("#question").is_visible()
    open_protocol(page, "first question visible")
    assert len(visible_methods(page)) == 6  # the full cache stands in both tables
    assert not page.locator("#filters").is_visible()
    context.close()
