"""A side that reads its results from a capture, a folder of runs that `capture` stored.

A capture is made on another machine or in another environment. Only the captured runs are
available, so stages cannot be replaced.
Source: docs/your-own-port.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.sides.capture_files import Row, StoredArrays, check, read_manifest
from parity.sides.capture_writer import capture, comparison_runs, entry_of, text_of
from parity.sides.side import AS_IS, Run, SideError, Trace

UNKNOWN = (
    "captured by an earlier version, which did not record updated buffers and parameters that are "
    "not trained"
)

__all__ = ["CapturedSide", "capture", "comparison_runs"]


class CapturedSide:
    """A side whose results are read from a capture, a folder with its stored runs.

    Args:
        folder: folder written by `capture`.
        parameters: parameters by name; needed only if the capture stores only their hashes.

    Raises:
        SideError: there is no capture at `folder`, or it was changed or has another schema.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        parameters: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        manifest = read_manifest(self.folder)
        try:
            self.kind: str = manifest["side"]
            self.versions: dict[str, str] = manifest["versions"]
            self.device: str = manifest["device"]
            self.parameter_rows = [Row.from_json(entry) for entry in manifest["parameters"]]
            self._inputs = self._arrays(manifest["inputs"])
            self._runs: list[dict[str, Any]] = manifest["runs"]
            self._refused: list[dict[str, Any]] = manifest["refused"]
        except (KeyError, TypeError) as error:
            raise SideError(
                f"the manifest of the capture {self.folder} lacks {error}: capture the side again"
            ) from error
        self._given = parameters

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters by path, memory-mapped from their files on access.

        Raises:
            SideError: the capture has only hashes, and no parameters were passed to this class, or
                others than the captured ones.
        """
        if all(row.file for row in self.parameter_rows):
            return StoredArrays(self.folder, self.parameter_rows)
        if self._given is None:
            raise SideError(
                f"the capture {self.folder} has only the hashes of its parameters: capture the "
                f"side with parameters=True, or pass CapturedSide(folder, parameters=...)"
            )
        names = {row.name for row in self.parameter_rows}
        if names != set(self._given):
            raise SideError(
                f"the parameters passed for {self.folder} are not those captured: missing "
                f"{_listed(names - set(self._given))}; extra {_listed(set(self._given) - names)}"
            )
        for row in self.parameter_rows:
            array = self._given[row.name]
            check(array, row, f"{row.name} of the parameters passed for {self.folder}")
        return self._given

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every input array by name, memory-mapped from its file.

        Raises:
            SideError: a file is missing or damaged.
        """
        return dict(self._inputs)

    def run(self, how: Run = AS_IS) -> Trace:
        """Return the captured results of a run with these settings.

        If no derivatives are requested, a captured run with derivatives is returned without them.
        A `Rounding.CONSTANTS` run that was captured without `Run.shared` is returned also if
        `Run.shared` is requested. It perturbed all tables of the captured side, also those that the
        other side shares, which may overestimate the noise floor. It perturbed no trained
        parameters, also not those that the other side lacks, which may underestimate it.

        Raises:
            SideError: the run was not captured, or the side refused it.
        """
        if how.forced:
            raise SideError(
                f"{self.folder} is a capture: its stages cannot be replaced. Run the "
                f"{self.kind} side itself, or use it as the original"
            )
        entry = next((entry for entry in self._runs if self._answers(entry, how)), None)
        if entry is None:
            raise SideError(self._why_not(how))
        exact = None if entry["base"] is None else self._runs[entry["base"]]
        stages = self._values(entry, exact, "stages")
        gradients = {} if how.cotangents is None else self._values(entry, exact, "gradients")
        return Trace(
            stages,
            tuple(entry["outputs"]),
            gradients,
            (*entry["notices"], *(() if "frozen" in entry else (UNKNOWN,))),
            exact=self._values(entry, None, "exact"),
            unread=dict(entry["unread"]),
            frozen=tuple(entry.get("frozen", ())),
            updated=tuple(entry.get("updated", ())),
        )

    def text(self) -> str:
        """Describe the capture, with one line per run; refused runs come last, with the reason."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"capture of a {self.kind} side on {self.device}: {versions}"]
        lines += [f"  {text_of(entry)}" for entry in self._runs]
        lines += [f"  not {text_of(entry)}: {entry['why']}" for entry in self._refused]
        return "\n".join(lines)

    def _answers(self, entry: Mapping[str, Any], how: Run) -> bool:
        asked = entry_of(how)
        if any(entry[name] != asked[name] for name in ("precision", "rounding")):
            return False
        if how.rounding is not None and entry["seed"] != how.seed:
            return False
        # A run captured with `Run.shared` perturbed all other parameters, which are at least those
        # of a request that shares more.
        if not set(entry["shared"]) <= (how.shared or frozenset()):
            return False
        return how.cotangents is None or self._same_cotangents(entry, how.cotangents)

    def _same_cotangents(
        self, entry: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]
    ) -> bool:
        if not entry["derivatives"]:
            return False
        own = self._arrays(entry["cotangents"])
        return set(own) == set(cotangents) and all(
            np.array_equal(own[name], cotangents[name]) for name in own
        )

    def _values(
        self, entry: Mapping[str, Any], exact: Mapping[str, Any] | None, group: str
    ) -> dict[str, np.ndarray]:
        """Return the arrays of one group of a captured run: `stages`, `gradients`, or `exact`, the
        integer and bool results.

        Arrays of a perturbed run may be stored as differences from the unperturbed float64 run,
        whose entry is the argument `exact`; its arrays are then added.
        """
        differs = {row["name"] for row in entry[group] if row["differs"]}
        base = {} if exact is None or not differs else self._arrays(exact[group])
        # Copied, because a trace may outlive the files.
        return {
            name: np.array(array if name not in differs else base[name] + array.astype(np.float64))
            for name, array in self._arrays(entry[group]).items()
        }

    def _arrays(self, entries: list[dict[str, Any]]) -> StoredArrays:
        rows = [{k: v for k, v in entry.items() if k != "differs"} for entry in entries]
        return StoredArrays(self.folder, [Row.from_json(row) for row in rows])

    def _why_not(self, how: Run) -> str:
        asked = entry_of(how)
        for entry in self._refused:
            if text_of(entry) == text_of(asked):
                return entry["why"]
        has = "; ".join(dict.fromkeys(text_of(entry) for entry in self._runs))
        same = [entry for entry in self._runs if text_of(entry) == text_of(asked)]
        hint = ""
        if same and how.cotangents is not None:
            hint = (
                " The captured derivatives are of other outputs or with other cotangents: capture "
                "the side with comparison_runs(side, outputs=..., valid=...), as in the comparison."
            )
        return f"the capture {self.folder} has no run {text_of(asked)}; it has: {has}.{hint}"


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
