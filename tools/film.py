"""Makes a short film of a report page: an animated PNG of a reader's clicks, from a list of steps.

`python -m tools.film PAGE tools/film.json --to docs/reports/film.png` opens PAGE in Chromium and
performs the steps of the file, a JSON list of objects:

| key | meaning |
| --- | --- |
| `do` | `show`; `scroll` to `at`; `click` on it; `fill` it with `text`; `press` the key `text` |
| `at` | CSS selector of the element, in Playwright's dialect; the first match is used |
| `caption` | a line over the picture; without it the previous one stays, "" removes it |
| `seconds` | how long the picture stays |

A step whose element does not exist is an error that names it. Only Chromium and playwright are
needed: pictures are reduced to 256 colours, and each after the first stores only the rectangle that
changed.
"""

from __future__ import annotations

import argparse
import base64
import json
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.files import written_aside

ACTIONS = ("show", "scroll", "click", "press", "fill")
# A README loads the film each time.
BYTES = 1_500_000
"""Largest film that is accepted, in bytes."""
COLOURS = 256
AIM = 0.8
"""Seconds for which a ring shows where the next click will be."""
SETTLED = 250
"""Milliseconds to wait after an action, while the page unpacks its content."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PIXELS = """async (png) => {
  const bytes = Uint8Array.from(atob(png), (c) => c.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, image.width, image.height).data;
  let text = "";
  for (let i = 0; i < data.length; i += 32768)
    text += String.fromCharCode(...data.subarray(i, i + 32768));
  return [image.width, image.height, btoa(text)];
}"""
_CAPTION = """(text) => {
  let line = document.getElementById("film-caption");
  if (!line) {
    line = document.createElement("div");
    line.id = "film-caption";
    line.style.cssText = "position:fixed;z-index:99;left:50%;bottom:1.25rem;"
      + "transform:translateX(-50%);max-width:90%;padding:.5rem 1.125rem;"
      + "border-radius:8px;background:#10233a;color:#fff;"
      + "font:600 1.125rem/1.4 system-ui,sans-serif;text-align:center";
    document.body.append(line);
  }
  line.textContent = text;
  line.hidden = !text;
}"""
_RING = """(place) => {
  document.getElementById("film-ring")?.remove();
  if (!place) return;
  const ring = document.createElement("div");
  ring.id = "film-ring";
  ring.style.cssText = "position:fixed;z-index:98;width:2.25rem;height:2.25rem;"
    + "border-radius:50%;border:3px solid #d97706;background:#d9770640;"
    + "transform:translate(-50%,-50%);pointer-events:none";
  ring.style.left = place[0] + "px";
  ring.style.top = place[1] + "px";
  document.body.append(ring);
}"""


@dataclass(frozen=True)
class Step:
    """One step of a film; the module docstring describes the fields."""

    do: str
    at: str = ""
    text: str = ""
    caption: str | None = None
    seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.do not in ACTIONS:
            raise ValueError(f"expected one of {', '.join(ACTIONS)}, received {self.do!r}")
        if self.do in ("scroll", "click", "fill") and not self.at:
            raise ValueError(f"expected where to {self.do}: give the step `at`, a CSS selector")
        if self.do == "press" and not self.text:
            raise ValueError("expected a key to press: give the step `text`, such as `f`")


@dataclass(frozen=True)
class Frame:
    """A picture, as red, green and blue of every pixel, and how long it stays."""

    pixels: np.ndarray
    seconds: float


def read_steps(path: Path) -> list[Step]:
    """Read the steps of a film.

    Raises:
        ValueError: one is invalid; the message says which and why.
    """
    known = {field.name for field in fields(Step)}
    steps = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8")), start=1):
        if unknown := sorted(row.keys() - known):
            raise ValueError(
                f"step {i} of {path}: no key {unknown[0]!r}; there are {sorted(known)}"
            )
        try:
            steps.append(Step(**row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"step {i} of {path}: {error}") from error
    return steps


def shoot(page: Path, steps: Sequence[Step], width: int, height: int, scheme: str) -> list[Frame]:
    """Open a page in Chromium, perform the steps, and return a picture of each.

    Raises:
        ValueError: an element does not exist.
    """
    from playwright.sync_api import sync_playwright

    from tests.browser.chromium import executable

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--force-device-scale-factor=1"]
        browser = playwright.chromium.launch(executable_path=executable(), args=arguments)
        size: Any = {"width": width, "height": height}
        look: Any = scheme
        # Without smooth scrolling, so that every picture shows a position where a reader stops.
        context = browser.new_context(
            viewport=size, color_scheme=look, reduced_motion="reduce", offline=True
        )
        tab, canvas = context.new_page(), context.new_page()
        tab.goto(page.resolve().as_uri())
        frames = []
        for i, step in enumerate(steps, start=1):
            for seconds in _act(tab, step, i):
                shot = tab.screenshot(animations="disabled", caret="hide")
                frames.append(Frame(_pixels(canvas, shot), seconds))
        browser.close()
    return frames


def _act(tab: Any, step: Step, number: int) -> Iterator[float]:
    """Perform a step; yield the duration of each picture when it should be taken."""
    place = tab.locator(step.at).first if step.at else None
    if place is not None:
        try:
            place.wait_for(timeout=5000)
        except Exception as error:
            raise ValueError(
                f"step {number}: no {step.at!r} on the page within 5 s; look for what the page "
                "calls it now"
            ) from error
    if step.caption is not None:
        tab.evaluate(_CAPTION, step.caption)
    if place is not None:
        top = "(e) => e.scrollIntoView({ block: 'start' })"
        place.evaluate(top) if step.do == "scroll" else place.scroll_into_view_if_needed()
    if place is not None and step.do in ("click", "fill"):
        box = place.bounding_box()
        middle = [box["x"] + min(box["width"] / 2, 60), box["y"] + box["height"] / 2]
        tab.evaluate(_RING, middle)
        yield AIM
        tab.evaluate(_RING, None)
        place.click() if step.do == "click" else place.fill(step.text)
    if step.do == "press":
        tab.keyboard.press(step.text)
    tab.wait_for_timeout(SETTLED)
    yield step.seconds


def _pixels(canvas: Any, shot: bytes) -> np.ndarray:
    """Return red, green and blue of a picture, decoded by Chromium."""
    width, height, text = canvas.evaluate(_PIXELS, base64.b64encode(shot).decode())
    pixels = np.frombuffer(base64.b64decode(text), np.uint8)
    return pixels.reshape(height, width, 4)[..., :3]


def palette_of(frames: Sequence[Frame]) -> np.ndarray:
    """Return the palette: the mean colours of the most common 5-bit cells.

    A page consists of few colours and shades between them at the edges of letters, so the most
    common cells are its own colours, which keep their values.
    """
    pixels = np.concatenate([frame.pixels.reshape(-1, 3) for frame in frames])
    cells = _cells(pixels)
    counts = np.bincount(cells, minlength=2**15)
    commonest = np.argsort(-counts, kind="stable")[:COLOURS]
    commonest = commonest[counts[commonest] > 0]
    sums = [np.bincount(cells, pixels[:, i], 2**15)[commonest] for i in range(3)]
    return np.rint(np.stack(sums, 1) / counts[commonest, None]).astype(np.uint8)


def _cells(pixels: np.ndarray) -> np.ndarray:
    red, green, blue = (pixels[..., i].astype(np.int32) >> 3 for i in range(3))
    return red << 10 | green << 5 | blue


def indexed(pixels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Return the index of the nearest palette colour for each pixel."""
    cells = _cells(pixels)
    used = np.unique(cells)
    middle = np.stack([used >> 10 & 31, used >> 5 & 31, used & 31], 1) * 8 + 4
    distance = ((middle[:, None] - palette[None].astype(np.int32)) ** 2).sum(-1)
    nearest = np.zeros(2**15, np.uint8)
    nearest[used] = distance.argmin(1)
    return nearest[cells]


def animated(frames: Sequence[Frame]) -> bytes:
    """Return pictures of one size as an animated PNG that repeats forever.

    Source: https://www.w3.org/TR/png-3/, "11.3.6 Animation information".
    """
    palette = palette_of(frames)
    images = [indexed(frame.pixels, palette) for frame in frames]
    shown: list[tuple[np.ndarray, tuple[int, int], float]] = []
    for i, (image, frame) in enumerate(zip(images, frames, strict=True)):
        top, bottom, left, right = _changed(images[i - 1], image) if i else (0, *_whole(image))
        if i and top == bottom:
            # Nothing changed: extend the previous picture.
            part, place, seconds = shown[-1]
            shown[-1] = part, place, seconds + frame.seconds
            continue
        shown.append((image[top:bottom, left:right], (left, top), frame.seconds))
    height, width = images[0].shape
    chunks = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"acTL", struct.pack(">II", len(shown), 0)),
        _chunk(b"PLTE", palette.tobytes()),
    ]
    turn = 0
    for part, (left, top), seconds in shown:
        size = part.shape[1], part.shape[0], left, top
        control = struct.pack(">IIIIIHHBB", turn, *size, round(1000 * seconds), 1000, 0, 0)
        chunks.append(_chunk(b"fcTL", control))
        turn += 1
        # Each line of pixels starts with its filter type: 0 (none), the best for few colours.
        lines = np.concatenate([np.zeros((part.shape[0], 1), np.uint8), part], 1)
        data = zlib.compress(lines.tobytes(), 9)
        if turn == 1:
            chunks.append(_chunk(b"IDAT", data))
        else:
            chunks.append(_chunk(b"fdAT", struct.pack(">I", turn) + data))
            turn += 1
    return _SIGNATURE + b"".join(chunks) + _chunk(b"IEND", b"")


def _whole(image: np.ndarray) -> tuple[int, int, int]:
    return image.shape[0], 0, image.shape[1]


def _changed(before: np.ndarray, now: np.ndarray) -> tuple[int, int, int, int]:
    """Return the rectangle in which two pictures differ: top, bottom, left, right."""
    rows, columns = np.nonzero(before != now)
    if not len(rows):
        return 0, 0, 0, 0
    return rows.min(), rows.max() + 1, columns.min(), columns.max() + 1


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def main(words: Sequence[str] | None = None) -> int:
    """Make a film; return exit code 2 if a step or the page is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tools.film", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("page", type=Path, help="an HTML file")
    parser.add_argument("steps", type=Path, help="a JSON file with the steps")
    parser.add_argument("--to", type=Path, required=True, help="the animated PNG to write")
    parser.add_argument("--width", type=int, default=1120)
    parser.add_argument("--height", type=int, default=680)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    asked = parser.parse_args(words)
    try:
        steps = read_steps(asked.steps)
        frames = shoot(asked.page, steps, asked.width, asked.height, asked.scheme)
        film = animated(frames)
        if len(film) > BYTES:
            raise ValueError(
                f"expected at most {BYTES:,} bytes, received {len(film):,}: use fewer steps"
            )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with written_aside(asked.to) as aside:
        aside.write_bytes(film)
    seconds = sum(frame.seconds for frame in frames)
    print(f"{asked.to}: {len(frames)} pictures, {seconds:.0f} s, {len(film):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
