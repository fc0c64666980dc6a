"""Make the screenshots of docs/reports.md again.

`python -m tests.browser.screenshots docs/reports` does; the pages are those of the demonstration
history, from real runs of a few cases.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from reports.store import PAGE
from tests.browser.chromium import executable
from tests.reports.demonstration import demonstrate

CASES = ("plain", "slow_decay", "large_mean", "right_padding", "stream", "byte_lm")


def shoot(browser: Any, page: Path, target: Path, width: int, height: int, **options: Any) -> Any:
    """Save what a window of this size first shows of a page, and return the page."""
    size = {"width": width, "height": height}
    tab = browser.new_page(viewport=size, **options)
    tab.goto(page.as_uri())
    tab.screenshot(path=target)
    return tab


def main(folder: Path) -> None:
    """Write the pictures into `folder`."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, sync_playwright() as playwright:
        green, red = demonstrate(Path(root), CASES, report=print)
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        shoot(browser, green / PAGE, folder / "pass.png", 1280, 720)
        tab = shoot(browser, red / PAGE, folder / "regressed.png", 1280, 720, color_scheme="dark")
        shoot(browser, red / PAGE, folder / "phone.png", 320, 640)
        tab.emulate_media(color_scheme="light")
        tab.locator("#changes a.row").first.click()
        tab.locator("#records .detail").wait_for()
        tab.locator("#records .detail").screenshot(path=folder / "row.png")
        tab.locator("#heat .maps").first.screenshot(path=folder / "heat.png")
        browser.close()
    for path in sorted(folder.glob("*.png")):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
