"""A wrong derivative is wrong in all that was used before: what is used last is named first."""

from parity.port.report import first_use

STAGES = ["h.0.norm", "h.0.mlp.up", "h.0.mlp.down", "h.0[0]", "h.1.mlp", "h.10.mlp", "head"]


def test_a_parameter_is_used_in_its_own_module_or_the_nearest_around_it():
    assert first_use("h.0.mlp.down.kernel", STAGES) == 2
    assert first_use("h.0.gate", STAGES) == 0
    assert first_use("h.1.mlp.up.kernel", STAGES) == 4
    assert first_use("h.10.mlp.up.kernel", STAGES) == 5
    assert first_use("elsewhere.kernel", STAGES) == -1
    assert first_use("h.1.gate", ["h.10.mlp", "h.1.mlp"]) == 1
