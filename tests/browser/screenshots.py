"""Make the screenshots of docs/reports.md again.

`python -m tests.browser.screenshots docs/reports` does; the pages are those of the demonstration
history, from real runs of a few cases. It needs Chromium and Pillow.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from reports.store.schema import PAGE
from tests.browser.chromium import executable
from tests.reports.page.demonstration import demonstrate

CASES = ("plain", "slow_decay", "large_mean", "right_padding", "stream", "byte_lm")
COLOURS = 128
"""Of a picture: a page has few, and the repository keeps every version of it."""


def save(shot: bytes, target: Path) -> None:
    """Write a picture in few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(shot)).convert("RGB")
    palette = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(target, optimize=True)
    print(f"{target}: {target.stat().st_size:,} bytes")


def opened(browser: Any, page: Path, width: int, height: int, **options: Any) -> Any:
    """Open a page in a window of this size."""
    tab = browser.new_page(viewport={"width": width, "height": height}, **options)
    tab.goto(page.as_uri())
    return tab


def shoot(browser: Any, green: Path, red: Path, folder: Path) -> None:
    """Write the pictures of the pages of a good and of a bad night into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save(opened(browser, green, 1280, 720).screenshot(), folder / "pass.png")
    dark = opened(browser, red, 1280, 720, color_scheme="dark")
    save(dark.screenshot(), folder / "regressed.png")
    tab = opened(browser, red, 1280, 720)
    save(tab.locator("#heat .maps figure").first.screenshot(), folder / "heat.png")
    start = tab.locator("#starts tr", has_text="layers.0.cema").filter(has_text="JAX float32")
    start.first.locator("a").click()
    tab.locator("#records .tensor").wait_for()
    save(tab.locator("#records .tensor").screenshot(), folder / "row.png")


def main(folder: Path) -> None:
    """Build the demonstration and write its pictures into `folder`."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as root, sync_playwright() as playwright:
        green, red = demonstrate(Path(root), CASES, report=print)
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        shoot(browser, green / PAGE, red / PAGE, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
