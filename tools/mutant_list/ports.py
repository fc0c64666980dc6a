"""Mutants of what compares anybody's port: sides, rounding, matching, alignment, localisation."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_PORT = "test_port_compare.py"
_TORCH = "test_torch_side.py"
_CAPTURED = "test_captured.py"
_MATCHING = "test_matching.py"
_ALIGNMENT = "test_alignment.py"
_RETURNED = "test_returned.py"
_CONSEQUENCES = "test_consequences.py"
_FLOORS = "test_rounding_floors.py"
_TABLES = "test_tables_and_masks.py"
_COMPLEX = "test_complex.py"

COMPARE = of(
    "parity/port/compare.py",
    (
        "port_lacks_a_parameter",
        "a fresh parameter that the port lacks is nobody's business",
        'WEIGHTS, "unmatched", float(len(other) + len(lost))',
        'WEIGHTS, "unmatched", float(len(other))',
        _PORT,
    ),
    (
        "port_trained_parameter_lost",
        "every parameter that the port makes itself is missing",
        "fresh = [name for name in alone if values[name].size and np.ptp(values[name]) == 0]",
        "fresh = list(alone)",
        f"{_PORT} {_TABLES}",
    ),
    (
        "port_unequal_weights_pass",
        "a parameter that is nearly the original's is the original's",
        "other = [pair.port for pair in matching.pairs if not pair.is_equal]",
        "other: list[str] = []",
        _PORT,
    ),
    (
        "port_random_twice_is_well",
        "a side that computes something else each time is compared",
        "            if stage is not None:\n                name = partners",
        "            if stage is None:\n                name = partners",
        _PORT,
    ),
    (
        "stages_fed_are_no_gates",
        "an original without float64 is held to the float32 of the whole program alone",
        "if place.edge is PortEdge.ORIGINAL32_PORT64:",
        "if place.edge is None:",
        _PORT,
    ),
)

SIDE_RUNS = of(
    "parity/port/side_runs.py",
    (
        "masks_compared_as_numbers",
        "the lowest number of a dtype is compared with another's",
        "masks = (np.abs(x) >= MASK) &",
        "masks = (np.abs(x) >= np.inf) &",
        _TABLES,
    ),
    (
        "constants_of_both_sides_moved",
        "what both sides hold is moved on each of them",
        "how = Run(Precision.FLOAT64, rounding, seed, shared=self.shared)",
        "how = Run(Precision.FLOAT64, rounding, seed)",
        f"{_PORT} {_TABLES} {_CAPTURED}",
    ),
)

LOCALISATION = of(
    "parity/port/localisation.py",
    (
        "outputs_are_fed",
        "what a program returns is replaced, too, and so always right",
        "kept = {*port.best.outputs} | {",
        "kept = {*()} | {",
        f"{_PORT} test_port_subjects.py",
    ),
    (
        "padding_fed_as_zero",
        "where a program carries padding on, its stages are fed zeros in place of it",
        "for name, x in together_.stages(trace.whole).items() if",
        "for name, x in together_.stages(trace.stages).items() if",
        _TABLES,
    ),
    (
        "no_float32_localisation",
        "less precision than float32 is found and placed nowhere",
        "    if narrow.culprit is None:\n        return place",
        "    if narrow.culprit is not None:\n        return place",
        _PORT,
    ),
    (
        "floor_of_forced_free",
        "a stage on its own is allowed what the whole program rounds",
        "floors = floors_of(exact, lambda seed: port.moved(Rounding.OPERATIONS, seed, fed).stages)",
        "floors = floors_of(exact, lambda seed: port.moved(Rounding.OPERATIONS, seed).stages)",
        _PORT,
    ),
    (
        "forced_against_itself",
        "an original without float64 is not looked at stage by stage, only the port's rounding is",
        "        place = _against_float32(port, fed)",
        "        place = _in_float32(port, fed)",
        _PORT,
    ),
)

ROUNDING = of(
    "parity/port/rounding_floors.py",
    (
        "floors_added_in_squares_once",
        "errors of both sides are not added",
        "math.hypot(*(each.get(name, math.nan) for each in floors))",
        "max(each.get(name, math.nan) for each in floors) * 0.5",
        _FLOORS,
    ),
    (
        "lost_digits_untold",
        "no warning that an algorithm loses digits, which its own floor then excuses",
        "if port[name] > COSTLY * original[name]), None)",
        "if port[name] > 1e9 * original[name]), None)",
        _TABLES,
    ),
    (
        "no_floor_passes",
        "a stage whose rounding was not measured has any bound",
        "return bound if not math.isnan(floor) else math.nan",
        "return bound if not math.isnan(floor) else math.inf",
        _FLOORS,
    ),
    (
        "port_floor_of_one_side",
        "between two sides only the port's rounding is allowed for",
        "PortEdge.PORT32_ORIGINAL32: together(*sides, *tables),",
        "PortEdge.PORT32_ORIGINAL32: {n: 0.01 * x for n, x in p.items()},",
        _PORT,
    ),
    (
        "port_tables_in_float64",
        "float64 tolerances apply to values that either side holds in float32",
        "PortEdge.PORT64_ORIGINAL64: together(*tables, *map(narrowed, sides)),",
        "PortEdge.PORT64_ORIGINAL64: together(*map(narrowed, sides)),",
        _TABLES,
    ),
)

CONSEQUENCES = of(
    "parity/port/consequences.py",
    (
        "idle_outputs",
        "a returned value that differs has no effect either",
        "return named and not {pair.port, pair.original} & set(outputs)",
        "return named",
        _CONSEQUENCES,
    ),
    (
        "starts_at_two_quantities",
        "a difference starts at two quantities of one name, wherever it is",
        "return pair if any(s.broken and s.name not in failing for s in behind) else None",
        "return None",
        _CONSEQUENCES,
    ),
    (
        "idle_values",
        "what was paired by value may differ to no effect",
        "named = pair.by not in (AlignedBy.VALUE, AlignedBy.PIN) and pair.distance > EQUAL",
        "named = True",
        _CONSEQUENCES,
    ),
)

PROJECTION = of(
    "parity/sides/projection.py",
    (
        "padding_counts",
        "padded positions are compared",
        "return np.where(valid.reshape(axes), value, np.zeros((), value.dtype))",
        "return value",
        "test_jax_sides.py test_captured.py test_port_compare.py test_flax_models.py",
    ),
)

SAME_INPUTS = of(
    "parity/sides/same_inputs.py",
    (
        "inputs_of_one_name_only",
        "what one side got by place is not compared",
        "alone = len(like) == len(rivals) == 1 and (_by_place(name) or _by_place(like[0]))",
        "alone = False",
        _CAPTURED,
    ),
    (
        "masks_are_positions",
        "inputs of one shape are one input",
        "alone = len(like) == len(rivals) == 1 and (_by_place(name) or _by_place(like[0]))",
        "alone = len(like) == len(rivals) == 1",
        _CAPTURED,
    ),
    (
        "unequal_inputs_compared",
        "inputs that differ are compared anyway",
        "        if name in like or alone:",
        "        if False:",
        f"{_CAPTURED} {_PORT}",
    ),
)

TORCH = of(
    "parity/sides/torch_side.py",
    (
        "stages_are_views",
        "a stage is what an operation in place made of it later",
        "stages[unique] = _pairs(x.detach()).clone()",
        "stages[unique] = _pairs(x.detach())",
        _TORCH,
    ),
    (
        "inputs_are_shared",
        "a module that changes its input in place changes the next run's",
        "return x.to(_dtype_like(x, dtype), copy=True)",
        "return x.to(_dtype_like(x, dtype))",
        f"{_TORCH} {_PORT}",
    ),
    (
        "leaves_stay_narrow",
        "what a module keeps in float32 is a float32 leaf of the float64 run",
        "            x.data = x.data.to(_dtype_like(x, dtype))",
        "            pass",
        _TORCH,
    ),
    (
        "hooks_stay",
        "hooks stay on the user's module",
        "            hook.remove()",
        "            pass",
        _TORCH,
    ),
    (
        "torch_masks_excuse",
        "a mask of zeros and ones is taken to be rounded",
        "return torch.where(short, table, mode.moved(table, 1.0))",
        "return mode.moved(table, 1.0)",
        _RETURNED,
    ),
    (
        "buffers_stay_moved",
        "a module in training mode is another one after it was read",
        "                    buffer.copy_(kept[name])",
        "                    pass",
        f"{_TORCH} {_RETURNED}",
    ),
    (
        "imaginary_parts_lost",
        "complex tables lose their imaginary parts in float64",
        "module = module._apply(lambda x: x.to(_dtype_like(x, dtype)))",
        "module = module._apply(lambda x: x.real.to(dtype) if _floating(x) else x)",
        _RETURNED,
    ),
    (
        "float64_refused_is_given_up",
        "a module that refuses float64 is compared in float32 alone",
        "            self._unseen = True",
        "            self._unseen = False",
        _TORCH,
    ),
    (
        "second_call_lost",
        "a module that is called twice has one stage",
        '                    unique, count = f"{name}#{count}", count + 1',
        "                    del stages[unique]",
        _TORCH,
    ),
)

TORCH_LIFT = of(
    "parity/sides/torch_lift.py",
    (
        "torch_casts_stay_narrow",
        "what a module casts to float32 inside is float32 in its float64 run",
        "        return WIDE.get(x, x)",
        "        return x",
        _TORCH,
    ),
    (
        "unseen_float64_shows",
        "a module that refuses float64 sees it",
        "return NARROW.get(result, result) if",
        "return result if",
        _TORCH,
    ),
    (
        "torch_sums_round_once",
        "a sum of many terms rounds as one operation",
        "changed = self.moved(args[which], math.sqrt(1 + terms / 11))",
        "changed = args[which]",
        _TORCH,
    ),
    (
        "torch_rounds_nothing",
        "no result of an operation is moved",
        "        return tree_map(lambda x: self._rounded(x, units, name), result)",
        "        return result",
        _TORCH,
    ),
    (
        "torch_rounding_keeps_angles",
        "rounding moves the modulus of a complex number alone",
        "moves = torch.complex(moves, self._draw(x))",
        "moves = torch.complex(moves, 0 * moves)",
        _COMPLEX,
    ),
)

COMPLEX = of(
    "parity/sides/complex_pairs.py",
    (
        "imaginary_parts_dropped",
        "a side gives the real part of what is complex, twice",
        "    return np.ascontiguousarray(x)[..., None].view(np.finfo(x.dtype).dtype)",
        "    return np.stack([x.real, x.real], axis=-1)",
        _COMPLEX,
    ),
    (
        "complex_outputs_conjugated",
        "what a JAX side returns has the other sign of the imaginary part",
        "jnp.stack([x.real, x.imag], axis=-1)",
        "jnp.stack([x.real, -x.imag], axis=-1)",
        _COMPLEX,
    ),
)

MATCHING = of(
    "parity/engine/pairing/matching.py",
    (
        "rounded_is_equal_silently",
        "weights that went through bfloat16 are matched without a note",
        'note = f"the {{}} has been through {dtype.name}"',
        'note = ""',
        _MATCHING,
    ),
    (
        "unequal_constants_pair",
        "names alone pair what is constant",
        "            if layout := fit(self.original[name], self.port[port]):\n"
        "                constant",
        "            layout = fit(self.original[name], self.original[name])\n"
        "            if layout:\n"
        "                constant",
        _MATCHING,
    ),
    (
        "tied_untold",
        "that one tensor stands in two places is not said",
        'tied = f"tied with {\', \'.join(others)}" if others else ""',
        'tied = ""',
        _MATCHING,
    ),
)

ALIGNMENT = of(
    "parity/engine/pairing/alignment.py",
    (
        "constants_pair_by_value",
        "masks and zeros are paired by their values",
        "return np.where((self.close.distance <= self.equal) & self.telling, worth, 0.0)",
        "return np.where(self.close.distance <= self.equal, worth, 0.0)",
        _ALIGNMENT,
    ),
    (
        "pins_ignored",
        "what a person corrected is not followed",
        "            self._pair(i, j, AlignedBy.PIN)",
        "            pass",
        _ALIGNMENT,
    ),
    (
        "result_is_any_stage",
        "a result may be held to another result",
        "            if self.outputs[i, j]:\n                self.barred[i], ",
        "            if False:\n                self.barred[i], ",
        _RETURNED,
    ),
    (
        "result_transposed",
        "a result that is transposed is the same result",
        "if self.outputs[i, j] and x.shape == y.shape and self.by[i] is not AlignedBy.PIN:",
        "if False:",
        _RETURNED,
    ),
    (
        "nothing_aligns_and_passes",
        "programs that have nothing in common are aligned",
        "    if len(result.pairs) < needed:",
        "    if len(result.pairs) < 0:",
        _ALIGNMENT,
    ),
)

EVALUATION = of(
    "parity/engine/programs/rounding.py",
    (
        "rounding_keeps_angles",
        "rounding moves the modulus of a complex number alone",
        "jax.lax.complex(moves, self._draw(value.shape))",
        "jax.lax.complex(moves, 0 * moves)",
        _COMPLEX,
    ),
    (
        "jax_rounds_nothing",
        "the result of an operation is not moved",
        "return value * factor.astype(value.dtype)",
        "return value",
        "test_evaluation.py",
    ),
    (
        "jax_tables_exact",
        "what a program holds in float32 is taken for exact",
        "return jnp.where(short, wide, wide * (1 + moves))",
        "return wide",
        "test_evaluation.py",
    ),
    (
        "jax_masks_excuse",
        "a mask of zeros and ones is taken to be rounded",
        "return jnp.where(short, wide, wide * (1 + moves))",
        "return wide * (1 + moves)",
        f"test_evaluation.py {_RETURNED}",
    ),
)

MUTANTS = (
    *(*COMPARE, *SIDE_RUNS, *LOCALISATION, *ROUNDING, *CONSEQUENCES, *PROJECTION, *SAME_INPUTS),
    *(*TORCH, *TORCH_LIFT, *COMPLEX, *MATCHING, *ALIGNMENT, *EVALUATION),
)
