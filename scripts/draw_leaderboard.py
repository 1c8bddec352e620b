"""docs/leaderboard.png: the top of the site that is built from the curated results, in Debian's chromium.

python scripts/draw_leaderboard.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pages import take_no_arguments
from playwright.sync_api import sync_playwright

from kvbench.leaderboard.site.build import build_site

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "leaderboard.png"


def main() -> None:
    """Build the site, open it, and keep what is seen."""
    take_no_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        build_site(ROOT / "results", Path(folder) / "site")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1500})
        page.goto((Path(folder) / "site" / "index.html").as_uri())
        page.screenshot(path=PICTURE)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
