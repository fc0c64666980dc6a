"""Types of command-line parameters that are names, such as cases and faults, with completion.

Source: docs/commands.md "Names".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

# Everything heavy is imported inside the functions: help and usage errors must be instant.

FEW = 30
"""Largest number of names that an error message lists; for more it names the listing command."""


class Name(click.ParamType):
    """Type of a parameter that is one of a fixed set of names.

    An unknown name is a usage error with suggestions; TAB completes in a shell.
    """

    def __init__(
        self,
        what: str,
        names: Callable[[], Sequence[str]],
        listed: str = "",
        absent: Callable[[], str] = str,
    ) -> None:
        """Configure the type.

        Args:
            what: noun for messages, such as "case".
            names: function that returns the valid names.
            listed: command that lists the names, for messages if there are more than `FEW`.
            absent: function that returns a sentence about names that this installation lacks, or
                "" (the default); it ends the error message.
        """
        self.name, self.names, self.listed, self.absent = what, names, listed, absent

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name in its canonical spelling, ignoring case.

        Raises:
            click.BadParameter: the name is unknown.
        """
        names = self.names()
        spelled = {name.lower(): name for name in names}
        if value not in names and value.lower() not in spelled:
            message = unknown(self.name, value, names, self.listed)
            self.fail(f"{message} {self.absent()}".rstrip(), param, ctx)
        return value if value in names else spelled[value.lower()]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that start with `incomplete`, ignoring case."""
        start = incomplete.lower()
        return [CompletionItem(name) for name in self.names() if name.lower().startswith(start)]


def unknown(what: str, value: str, names: Sequence[str], listed: str = "") -> str:
    """Return the error message for an unknown name.

    The message suggests similar names. If no name is similar, it names the command `listed` if
    there are more than `FEW` names, and otherwise lists all of them. `what` is the noun, such as
    "case".
    """
    from reports.text import closest

    if close := closest(value, names):
        return f"no {what} {value!r}. Did you mean {' or '.join(map(repr, close))}?"
    if listed and len(names) > FEW:
        return f"no {what} {value!r}; `megalodon-numerics {listed}` lists all {len(names)}."
    return f"no {what} {value!r}; there are {', '.join(names) or 'none'}."


def _triangle() -> list[str]:
    from parity.megalodon.cases import CASES

    return [case.name for case in CASES]


def _of_a_night() -> list[str]:
    from reports.subject import names_by_part

    return [*_triangle(), *sorted(name for names in names_by_part().values() for name in names)]


def _recorded() -> list[str]:
    from parity.deepseek_v3.cases import CASES

    return [*_triangle(), *(case.name for case in CASES)]


def _public() -> list[str]:
    from reports.cases import cases

    return list(cases())


def _faults() -> list[str]:
    from parity.faults import FAULTS

    return [fault.name for fault in FAULTS]


def _absent_faults() -> str:
    from parity.faults import absent

    return absent()


def _families() -> list[str]:
    from parity.faults import Family

    return [family.value for family in Family]


def _tables() -> list[str]:
    from stability.dtype_audit.pinned_rows import PROGRAMS

    return sorted(PROGRAMS)


CASE = Name("case", _triangle, "parity cases")
NIGHTLY_CASE = Name("case", _of_a_night, "parity cases")
RECORDED_CASE = Name("case", _recorded, "parity cases")
PUBLIC_CASE = Name("case", _public, "case")
FAULT = Name("fault", _faults, "parity faults --list", _absent_faults)
FAMILY = Name("family", _families)
TABLE = Name("pinned table", _tables)


def stored_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return names of cases in stored runs that start with `incomplete`, for the shell.

    If the command already has a case, return names of that case's quantities instead.
    """
    from reports.registry.lookback import measured_names

    place = ctx.params.get("place") or "runs"
    if not Path(place).is_dir():
        return []
    names = measured_names(str(place), ctx.params.get("case"))
    return [name for name in names if name.startswith(incomplete)]
