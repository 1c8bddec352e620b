"""The site in Debian's chromium, opened from disk and driven by Playwright."""

from __future__ import annotations

import shutil

import pytest

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


@pytest.fixture
def page(browser, site):
    """The index page. Console errors and requests outside the site fail the test at its end."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    yield page
    context.close()
    assert said == []
    assert [x for x in asked if not x.startswith((site.as_uri(), "data:"))] == []


def visible_methods(page):
    """Method names of the visible rows, in order."""
    return page.locator("tr.row:visible th[scope=row] a").all_inner_texts()


def test_filters_hide_other_runs(page):
    """Filters by visibility, family and text are kept in the URL, which restores the view."""
    assert page.locator("#shown").inner_text().startswith("7 of 7 runs, in 2 of 2 protocols.")
    page.get_by_label("Visibility").select_option("first-turn")
    assert page.locator("#shown").inner_text().startswith("5 of 7 runs, in 1 of 2 protocols.")
    assert page.locator("section.group:visible").count() == 1
    page.get_by_label("Find").fill("kvzip")
    assert visible_methods(page) == ["kvzip"]
    assert page.url.endswith("#visibility=first-turn&find=kvzip")
    other = page.context.new_page()
    other.goto(page.url)
    assert visible_methods(other) == ["kvzip"]
    other.close()
    page.get_by_label("Find").fill("no such method")
    assert page.get_by_text("No run matches the filters.").is_visible()
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("document.getElementById('shown').textContent.startsWith('7 of 7')")
    assert "#" not in page.url


def test_sorting_stays_within_a_band(page):
    """Three clicks: two orders, then the initial one. The full cache stays first."""
    page.get_by_label("Visibility").select_option("first-turn")
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


def test_everything_is_reached_by_keyboard(page):
    """The skip link, the filters and a sorting head have a visible focus."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_label("Visibility").focus()
    page.keyboard.press("f")  # as in first-turn
    assert page.locator("section.group:visible").count() == 1
    page.locator("table.rows:visible thead button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    unnamed = page.evaluate("[...document.querySelectorAll('select, input, button, a, [tabindex]')].filter("
                            "x => !(x.labels?.length || x.textContent.trim() || x.ariaLabel)).length")
    assert unnamed == 0


def test_links_lead_to_methods_runs_and_files(page, site):
    """Links lead from the index to a method, to a run, and to its files."""
    page.get_by_role("link", name="kvzip", exact=True).first.click()
    assert page.locator("h1").inner_text() == "kvzip"
    assert page.locator(".curve circle").count() == 1
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
    page.get_by_label("Family").select_option(HOSTILE)
    assert visible_methods(page) == [HOSTILE]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_narrow_screen(browser, site, scheme):
    """At 390 pixels only tables and charts scroll, and tables show the main columns."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    page.goto((site / "index.html").as_uri())
    heads = page.locator("table.rows").first.locator("thead th:visible").all_inner_texts()
    assert [x.split()[0] for x in heads] == ["Rank", "Method", "Stored", "Score", "Run"]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(253, 253, 252)", "dark": "rgb(20, 23, 26)"}[scheme]
    context.close()


def test_pages_work_without_scripts(browser, site):
    """Only filters and sorting are missing."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert len(visible_methods(page)) == 8  # the full cache stands in both tables
    assert not page.locator("#filters").is_visible()
    context.close()
