"""A command that ends before it has ended is no success, whatever its exit code is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from parity.executors.supervision import ENDED
from tests.helpers import ROOT

BEFORE = """
import atexit, ctypes, os, signal, sys, time
from parity.executors.supervision import supervised
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    """Run a command of these lines, supervised."""
    lines = textwrap.indent(textwrap.dedent(body), "    ")
    code = f"{BEFORE}\ndef command():\n{lines}\n\nsys.exit(supervised(command))\n"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


WATCH = """
from parity.executors.interrupts import end_with, ended_in_time
with ended_in_time(3):
    end_with(0)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "body",
    [
        "os._exit(0)",
        "ctypes.CDLL(None)._exit(0)",
        "ctypes.CDLL(None).exit(0)",
        # A fork that goes on is not the command.
        "if os.fork(): os._exit(0)",
    ],
)
def test_an_end_without_a_record_is_incomplete(body: str) -> None:
    done = run(body)
    assert done.returncode == ENDED, done.stderr
    assert "before the command did" in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 0", 0),
        ("pass", 0),
        ("sys.exit(4)", 4),
        ("sys.exit()", 0),
        ("sys.exit('no')", 1),
        ("raise ValueError('no')", 1),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        # A signal that is forwarded ends the process that waits, too.
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        # The verdict was said; who ends the process afterwards does not change it.
        ("atexit.register(os._exit, 0); return 1", 1),
        ("atexit.register(os._exit, 9); return 0", 9),
        # A watch is ended by an interrupt, and has a code of its own.
        (WATCH, 0),
    ],
)
def test_an_end_with_a_record_has_its_code(body: str, code: int) -> None:
    assert run(body).returncode == code


def test_what_is_written_arrives_once() -> None:
    done = run("print('out'); print('err', file=sys.stderr); return 0")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(0)", ENDED),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_process_that_a_command_left_behind_is_not_waited_for(end: str, code: int) -> None:
    """It has the pipe of the record, and lives for as long as its own input is open."""
    program = f"""{BEFORE}
def command():
    if not os.fork():
        os.read(0, 1)
        os._exit(0)
    {end}

sys.exit(supervised(command))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as driver:
        try:
            assert driver.wait(timeout=60) == code
        finally:
            driver.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_command_and_it_ends_with_its_parent(number: signal.Signals) -> None:
    code = BEFORE + textwrap.dedent("""
        from parity.executors.interrupts import ended_in_time

        def command():
            with ended_in_time(3):
                print(os.getpid(), flush=True)
                time.sleep(60)

        sys.exit(supervised(command))
    """)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    # As a shell starts what runs in the background: SIGINT is ignored until somebody handles it.
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    start = ignoring + "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", start, code]
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        assert child != driver.pid
        driver.send_signal(number)
        assert driver.wait(timeout=60) == (3 if number != signal.SIGKILL else -number)
        # It holds the pipe for as long as it lives.
        assert driver.stdout.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_before_it_is_forwarded_is_not_lost(number: signal.Signals) -> None:
    """Neither ignored, as SIGINT in the background, nor the end of the waiting process alone."""
    code = BEFORE + textwrap.dedent(f"""
        from parity.executors.interrupts import ended_in_time

        fork, (started, start) = os.fork, os.pipe()

        def forked():
            child = fork()
            if child:
                os.read(started, 1)
                os.kill(os.getpid(), {int(number)})
            return child

        def command():
            with ended_in_time(3):
                os.write(start, b"x")
                time.sleep(60)

        os.fork = forked
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(supervised(command))
    """)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=50, check=False)
    assert done.returncode == 3


EXITS = ("import os; os._exit(0)", "import ctypes; ctypes.CDLL(None)._exit(0)")
USER_FILES = {
    "port": "port",
    "mesh": "step",
    "capture": "port",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("command", USER_FILES)
def test_no_command_is_green_where_a_file_of_the_user_ends_the_process(tmp_path, command) -> None:
    for n, exits in enumerate(
        ("import os; os._exit(0)", "import ctypes; ctypes.CDLL(None)._exit(0)")
    ):
        file = tmp_path / f"mine{n}.py"
        file.write_text(f"def {USER_FILES[command]}():\n    {exits}\n", encoding="utf-8")
        more = [str(tmp_path / "out"), "--side", "port"] if command == "capture" else []
        done = subprocess.run(
            [sys.executable, "-m", "megalodon_numerics", command, str(file), *more],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode in (2, ENDED), (exits, done.stdout, done.stderr)
        assert "exit" in done.stderr
