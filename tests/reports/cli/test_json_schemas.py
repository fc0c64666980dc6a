"""What --json prints is what its published schema says, for every command that has the option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator, ValidationError, validate

from megalodon_jax.convert import save_safetensors
from parity.faults import by_name, detection
from reports.cli import main
from reports.cli.export import schema_names
from reports.store.runs import write_run
from tests.helpers import ROOT, cli, model_of, tiny
from tests.reports.nights import bench, earlier, failing, measurement, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


def commands(group: click.Group = main, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name}-")


def schema(name: str) -> Any:
    result = cli("schema", name)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A good night, a bench, and a night with a failure."""
    root = tmp_path / "runs"
    gate = {"identity": "one"}
    write_run(root, earlier(measurement(**gate), suites=SUITES, day=18))
    write_run(root, bench(day=19))
    write_run(root, run(failing(**gate), failing(quantity="x", value=float("nan")), suites=SUITES))
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{}", encoding="utf-8")
    return root


def test_every_command_with_json_has_a_schema() -> None:
    names = {
        name
        for name, command in commands()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert names == set(schema_names())
    for name in names:
        Draft202012Validator.check_schema(schema(name))
    assert cli("schema").stdout.split() == sorted(names)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("list", 0),
        ("gate latest", 1),
        ("gate 2026-11-18", 0),
        ("compare 2026-11-18 2026-11-20", 1),
        ("history", 0),
        ("history baseline", 0),
        ("history baseline logits", 0),
        ("prune --keep 1", 0),
        ("doctor", 0),
    ],
)
def test_answers_about_stored_runs_are_valid(runs: Path, line: str, code: int) -> None:
    result = cli(*line.split(), "--out", runs, "--json")
    assert result.exit_code == code, result.output
    validate(json.loads(result.stdout), schema(line.split()[0]))


def test_planted_bugs_are_valid(monkeypatch) -> None:
    fault = by_name("rope_sign")
    rows = [
        detection.Detection(fault, "length_c", "jax64:oracle", fault.stage, 1e9),
        detection.Detection(fault, "length_c"),
    ]
    document = [detection.as_dict(row) for row in rows]
    validate(document, schema("parity-faults"))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("nightly --case length_c --reference recorded --quiet", "nightly"),
        ("port docs/examples/my_port.py --quiet", "port"),
        ("mesh docs/examples/my_step.py --mesh data=2,tensor=4", "mesh"),
        ("stability CHECKPOINT --quiet", "stability"),
        ("stability CHECKPOINT --what-if --quiet", "stability"),
        ("stability --subject mla-moe --quiet", "stability"),
        ("activations CHECKPOINT --quiet", "activations"),
        ("export-model CHECKPOINT OUT --no-verify --quiet", "export-model"),
        (
            "parity --torch parity/data/byte_lm --text README.md --length 32 --oracle-only "
            "--no-grad --quiet",
            "parity",
        ),
    ],
)
@pytest.mark.sweep
def test_answers_of_what_measures_are_valid(line: str, name: str, tmp_path: Path, monkeypatch):
    """CHECKPOINT is one of a small layer, which is examined in a tenth of the time."""
    config = tiny(vocab_size=256, num_layers=1)
    save_safetensors(model_of(config), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    line = line.replace("CHECKPOINT", str(tmp_path)).replace("OUT", str(tmp_path / "out"))
    monkeypatch.chdir(ROOT)
    out = ["--out", str(tmp_path / "runs")] if name in ("nightly", "port") else []
    result = cli(*line.split(), *out, "--json")
    assert result.exit_code in (0, 1), result.output
    validate(json.loads(result.stdout), schema(name))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gate", {"verdict": "FINE"}),
        ("gate", {"exit_code": 2}),
        ("gate", {"changes": [{}]}),
        ("list", {"runs": [{"id": 1}]}),
        ("history", {"rows": [{"case": "plain"}]}),
    ],
)
def test_another_answer_is_refused(runs: Path, name: str, change: dict[str, Any]) -> None:
    words = ["gate", "latest"] if name == "gate" else [name]
    document = json.loads(cli(*words, "--out", runs, "--json").stdout)
    validate(document, schema(name))
    with pytest.raises(ValidationError):
        validate(document | change, schema(name))


def test_an_unknown_schema_is_answered_with_the_closest() -> None:
    result = cli("schema", "gaet")
    assert (result.exit_code, "Did you mean 'gate'?" in result.output) == (2, True)
