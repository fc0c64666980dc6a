"""Items of milliseconds for the executors: what they do well, badly, and fatally."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def double(number: float) -> float:
    """Return twice a number."""
    return 2 * number


def refuse(text: str) -> None:
    """Raise."""
    raise ValueError(text)


def die(folder: str, times: int) -> str:
    """Kill the worker the first `times` times."""
    tries = Path(folder) / "tries"
    with tries.open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    count = len(tries.read_text(encoding="utf-8").splitlines())
    if count <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"survived after {count - 1}"


def setting(variable: str) -> list[object]:
    """Return a variable, and how many processors this process may use."""
    return [os.environ.get(variable, ""), len(os.sched_getaffinity(0))]


def set_variable(variable: str, value: str) -> None:
    """Set a variable, as libraries do when they are imported."""
    os.environ[variable] = value


def leave(folder: Path, text: str) -> None:
    """Leave a file in a folder of one's own."""
    (folder / "below").mkdir()
    (folder / "below" / "text").write_text(text, encoding="utf-8")


def wait(seconds: float, log: str = "", name: str = "") -> str:
    """Sleep, and write that it was done."""
    time.sleep(seconds)
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    return name


def alter(path: str, text: str) -> str:
    """Read a file, and leave another content in it."""
    before = Path(path).read_text(encoding="utf-8")
    Path(path).write_text(text, encoding="utf-8")
    return before


def read(path: str) -> str:
    """Return what a file holds."""
    return Path(path).read_text(encoding="utf-8")


def with_a_child(pids: str, seconds: float) -> None:
    """Start a process that sleeps, note its number and this one's, and sleep as well."""
    code = f"import time; time.sleep({seconds})"
    child = subprocess.Popen([sys.executable, "-c", code])
    with Path(pids).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(seconds)


if __name__ == "__main__":
    # A program that notes its number and sleeps.
    Path(sys.argv[1]).write_text(f"{os.getpid()}\n", encoding="utf-8")
    time.sleep(60)


def process() -> int:
    """Return the number of the process that runs the item."""
    return os.getpid()
