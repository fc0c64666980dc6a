"""The table of parameters in docs/model.md is the weight table."""

from __future__ import annotations

import re

import pytest

from megalodon_jax import MegalodonConfig
from megalodon_jax.weights import weight_table
from tests.helpers import ROOT

DOCUMENT = ROOT / "docs" / "model.md"
# Sizes that no two symbols share, so that a shape says which symbols it is made of.
SIZES = {"V": 61, "D": 32, "Z": 16, "E": 48, "F": 40, "N": 5, "`output_size`": 41}
CONFIG = MegalodonConfig(
    vocab_size=61,
    model_dim=32,
    num_layers=1,
    num_heads=2,
    z_dim=16,
    value_dim=48,
    ffn_hidden_dim=40,
    cema_ndim=5,
    chunk_size=16,
    norm_num_groups=4,
    swiglu=True,
    output_size=41,
)


def documented() -> dict[str, tuple[tuple[int, ...], str, bool]]:
    """Shape, role and sensitivity of every parameter, as the document has them."""
    text = DOCUMENT.read_text(encoding="utf-8").split("## State dict\n")[1].split("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| (`.*) \|$", text, re.M):
        names, shapes, roles, sensitive = (cell.strip() for cell in row.split("|"))
        first, *others = re.findall(r"`([\w.{}]+)`", names.split(", with")[0])
        stem = first.rpartition(".")[0]
        shapes = re.findall(r"\(([^)]*)\)", shapes)
        for i, name in enumerate([first, *(stem + other for other in others)]):
            sizes = shapes[i % len(shapes)].replace(" ", "").strip(",").split(",")
            shape = tuple(SIZES[size] if size in SIZES else int(size) for size in sizes)
            role = roles.split(", ")[i % len(roles.split(", "))]
            found[name.replace("{i}", "0")] = (shape, role, sensitive == "yes")
    return found


def test_the_document_has_every_parameter_as_it_is() -> None:
    expected = {row.name: (row.shape, str(row.role), row.sensitive) for row in weight_table(CONFIG)}
    assert documented() == expected


@pytest.mark.parametrize(
    ("old", "new"), [("(E, D)", "(D, E)"), ("| yes |", "| |"), (".omega", ".o")]
)
def test_a_table_that_is_wrong_is_seen(old: str, new: str, tmp_path, monkeypatch) -> None:
    wrong = tmp_path / "model.md"
    wrong.write_text(DOCUMENT.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    monkeypatch.setitem(globals(), "DOCUMENT", wrong)
    with pytest.raises(AssertionError):
        test_the_document_has_every_parameter_as_it_is()
