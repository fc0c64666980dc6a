"""An exit of user code is an error that says how and with which code it ended."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import pytest

from parity.engine.programs.exits import ExitError, OsExit, exits_named, os_exit_raises


@pytest.mark.parametrize(
    ("leave", "call"),
    [
        (lambda: sys.exit(), "sys.exit()"),
        (lambda: sys.exit(0), "sys.exit(0)"),
        (lambda: sys.exit(""), "sys.exit('')"),
        (lambda: sys.exit("no licence"), "sys.exit('no licence')"),
        (lambda: os._exit(0), "os._exit(0)"),
        (lambda: os._exit(7), "os._exit(7)"),
    ],
)
def test_an_exit_is_named_with_its_code(leave, call: str) -> None:
    with pytest.raises(ExitError) as error, exits_named("the port"):
        leave()
    assert str(error.value).startswith(f"the port called {call} instead of returning")
    assert isinstance(error.value.__cause__, SystemExit)


def test_of_several_exits_that_the_code_goes_on_from_the_first_is_named() -> None:
    before = os._exit
    with pytest.raises(ExitError, match=r"called os\._exit\(3\)"), exits_named("the port"):
        for code in (3, 4):
            with contextlib.suppress(SystemExit):
                os._exit(code)
    assert os._exit is before


def test_an_exit_of_a_thread_is_raised_where_the_code_ends() -> None:
    def leave() -> None:
        with contextlib.suppress(SystemExit):
            os._exit(5)

    goes_on = False
    with pytest.raises(OsExit) as error, os_exit_raises():
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        goes_on = True
    assert goes_on and error.value.code == 5


def test_another_error_of_the_code_stays_what_it_is() -> None:
    before = os._exit
    with pytest.raises(KeyError), exits_named("the port"):
        assert os._exit is not before
        raise KeyError
    assert os._exit is before
    with exits_named("the port"):
        pass
    assert os._exit is before
