"""The tool that makes a film of a page: steps, few colours, and an animated PNG that decodes."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from tools import film
from tools.film import Frame, Step, animated, main, palette_of, read_steps


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG, each with a checksum that fits."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, found = 8, []
    while at < len(data):
        (size,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (
            zlib.crc32(name + body),
        )
        found.append((name, body))
        at += 12 + size
    return found


def played(data: bytes) -> list[tuple[np.ndarray, float]]:
    """The pictures of an animated PNG as a viewer shows them, with their seconds."""
    parts = chunks(data)
    width, height, depth, kind = struct.unpack(">IIBB", parts[0][1][:10])
    assert (depth, kind) == (8, 3)
    palette = np.frombuffer(dict(parts)[b"PLTE"], np.uint8).reshape(-1, 3)
    screen, shown, turns, area = np.zeros((height, width), np.uint8), [], [], (0, 0, 0, 0)
    for name, body in parts:
        if name == b"fcTL":
            turn, *area, numerator, denominator, _, _ = struct.unpack(">IIIIIHHBB", body)
            turns.append(turn)
        elif name in (b"IDAT", b"fdAT"):
            if name == b"fdAT":
                turns.append(struct.unpack(">I", body[:4])[0])
                body = body[4:]
            wide, high, left, top = area
            lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(high, wide + 1)
            assert not lines[:, 0].any(), "no filter"
            screen[top : top + high, left : left + wide] = lines[:, 1:]
            shown.append((palette[screen], numerator / denominator))
    assert turns == list(range(len(turns)))
    assert struct.unpack(">II", dict(parts)[b"acTL"]) == (len(shown), 0)
    return shown


def picture(*spots: tuple[int, int, tuple[int, int, int]]) -> np.ndarray:
    pixels = np.full((40, 60, 3), 255, np.uint8)
    for row, column, colour in spots:
        pixels[row : row + 3, column : column + 4] = colour
    return pixels


def test_a_film_shows_each_picture_for_its_time() -> None:
    red, blue = (179, 32, 26), (31, 85, 181)
    pictures = [picture(), picture((5, 7, red)), picture((5, 7, red), (30, 50, blue))]
    data = animated([Frame(pixels, 0.5 + i) for i, pixels in enumerate(pictures)])
    for (shown, seconds), pixels, expected in zip(
        played(data), pictures, (0.5, 1.5, 2.5), strict=True
    ):
        np.testing.assert_array_equal(shown, pixels)
        assert seconds == expected


def test_only_the_rectangle_that_changed_is_stored() -> None:
    data = animated([Frame(picture(), 1), Frame(picture((5, 7, (0, 0, 0))), 1)])
    sizes = [struct.unpack(">IIII", body[4:20]) for name, body in chunks(data) if name == b"fcTL"]
    assert sizes == [(60, 40, 0, 0), (4, 3, 7, 5)]


def test_a_picture_that_is_the_one_before_prolongs_it() -> None:
    [(_, seconds)] = played(animated([Frame(picture(), 1), Frame(picture(), 2)]))
    assert seconds == 3


def test_common_colours_stay_as_they_are_among_many() -> None:
    ramp = np.zeros((64, 64, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(64) * 4, np.arange(64)[:, None] * 4
    ramp[:32] = (18, 21, 25)
    frame = Frame(ramp, 1)
    assert len(palette_of([frame])) == film.COLOURS
    [(shown, _)] = played(animated([frame]))
    np.testing.assert_array_equal(shown[:32], ramp[:32])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"do": "jump"}, "step 2 of .*: expected one of show, scroll, click"),
        ({"do": "click"}, "step 2 of .*: expected where to click"),
        ({"do": "press"}, "expected a key to press"),
        ({"do": "show", "second": 1}, "no key 'second'"),
        ({}, "step 2 of .*do"),
    ],
)
def test_a_step_that_is_none_is_named(tmp_path: Path, row: dict[str, object], said: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([{"do": "show"}, row]), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_steps(path)


def test_the_steps_in_the_repository_are_steps() -> None:
    steps = read_steps(Path(film.__file__).with_suffix(".json"))
    assert steps and all(isinstance(step, Step) for step in steps)


@pytest.mark.sweep
@pytest.mark.browser
def test_a_page_is_filmed(tmp_path: Path, capsys) -> None:
    page, steps, to = (tmp_path / name for name in ("page.html", "steps.json", "film.png"))
    page.write_text(
        "<!doctype html><title>x</title><button onclick='this.textContent=1'>go</button>"
        "<p style='margin-top:3000px'>end</p>",
        encoding="utf-8",
    )
    walk = [
        {"do": "show", "caption": "begin", "seconds": 1},
        {"do": "click", "at": "button", "caption": ""},
        {"do": "scroll", "at": "p"},
    ]
    steps.write_text(json.dumps(walk), encoding="utf-8")
    size = ["--width", "320", "--height", "200"]
    assert main([str(page), str(steps), "--to", str(to), *size]) == 0
    shown = played(to.read_bytes())
    assert [seconds for _, seconds in shown] == [1, film.AIM, 2, 2]
    assert all(pixels.shape == (200, 320, 3) for pixels, _ in shown)
    assert "4 pictures" in capsys.readouterr().out
    steps.write_text(json.dumps([{"do": "scroll", "at": "#gone"}]), encoding="utf-8")
    before = to.read_bytes()
    assert main([str(page), str(steps), "--to", str(to), *size]) == 2
    assert "step 1: no '#gone' on the page" in capsys.readouterr().err
    assert to.read_bytes() == before
