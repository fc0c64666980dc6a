"""Mutants of what decides in `parity`: comparer, tolerances, localisation, controls, triangle."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_COMPARE = "test_compare.py"
_TRIANGLE = "test_triangle.py"
_LOCALIZE = "test_localize.py"
_VERDICTS = "test_verdicts.py"

COMPARE = of(
    "parity/engine/measure/compare.py",
    (
        "gate_passes_nan",
        "a value that is no number passes",
        "verdict = Verdict.PASS if value <= bound else Verdict.FAIL",
        "verdict = Verdict.FAIL if value > bound else Verdict.PASS",
        _COMPARE,
    ),
    (
        "gate_exclusive",
        "a value equal to its tolerance fails",
        "verdict = Verdict.PASS if value <= bound else Verdict.FAIL",
        "verdict = Verdict.PASS if value < bound else Verdict.FAIL",
        _COMPARE,
    ),
    (
        "missing_quantities_skipped",
        "only what both sides have is compared",
        "names = self._ordered(set(actual) | set(expected))",
        "names = self._ordered(set(actual) & set(expected))",
        f"{_COMPARE}::test_missing_and_extra_fail",
    ),
    (
        "dtype_not_compared",
        "the left side may have any dtype",
        "if left.dtype.name != self.dtype:",
        "if left.dtype.kind != right.dtype.kind:",
        f"{_COMPARE}::test_a_narrower_dtype_fails_where_its_numbers_are_equal",
    ),
    (
        "missing_is_a_note",
        "a quantity that could not be measured is reported and does not fail",
        "return self._row(name, metric, math.inf, math.nan, Verdict.FAIL, note)",
        "return self._row(name, metric, math.inf, math.nan, Verdict.INFO, note)",
        _COMPARE,
    ),
    (
        "reference_error_near_zero",
        "beating an error that is rounding of the result counts",
        "ours / max(theirs, smallest)",
        "ours / theirs",
        _COMPARE,
    ),
    (
        "padding_compared",
        "masked positions are compared although they mean something else there",
        "return self.work.valid if self.only_valid and Quantity(name).is_activation else None",
        "return None if self.only_valid and Quantity(name).is_activation else None",
        _COMPARE,
    ),
    (
        "stages_unknown",
        "no measurement knows where in the order of computation it is",
        "stage=order.index(name) if name in order else -1,",
        "stage=-1,",
        _COMPARE,
    ),
    (
        "truth_and_reference_swapped",
        "the reference's error is divided by ours",
        "for side in (actual, reference)",
        "for side in (reference, actual)",
        _COMPARE,
    ),
)

METRICS = of(
    "parity/engine/measure/metrics.py",
    (
        "truth_may_be_nan",
        "only the actual side is checked for non-finite values",
        "if not (np.isfinite(a).all() and np.isfinite(e).all()):",
        "if not np.isfinite(a).all():",
        f"{_COMPARE}::test_non_finite_is_never_equal {_COMPARE}",
    ),
    (
        "anything_equals_zero",
        "off a truth of 0 every error is 0",
        "return difference / scale if scale > 0.0 else difference",
        "return difference / scale if scale > 0.0 else 0.0",
        f"{_COMPARE}::test_relative_l2",
    ),
    (
        "flips_excused_too_often",
        "a swap of twice the margin that the bound explains is excused",
        "math.sqrt(2) * bound",
        "2.0 * math.sqrt(2) * bound",
        f"{_COMPARE}::test_a_flip_counts_where_the_tolerance_cannot_explain_it",
    ),
    (
        "texts_part_where_the_last_does",
        "two texts part where the last of their rows does",
        "same.min(initial=a.shape[-1])",
        "same.max(initial=0)",
        f"{_COMPARE}::test_disagreement_counts_what_is_left_when_texts_part",
    ),
    (
        "kl_of_the_wrong_side",
        "KL is weighed by the actual side",
        "kl = np.sum(np.exp(log_e) * (log_e - log_a), axis=-1)",
        "kl = np.sum(np.exp(log_a) * (log_e - log_a), axis=-1)",
        _COMPARE,
    ),
    (
        "ulps_halved",
        "a unit in the last place is twice what it is",
        "np.maximum(exponent - 1, int(info.minexp))",
        "np.maximum(exponent, int(info.minexp))",
        f"{_COMPARE}::test_ulps_count_gaps_of_the_dtype",
    ),
    (
        "overlap_without_union",
        "the overlap of the likeliest tokens is a share of k",
        "shared / (2 * k - shared)",
        "shared / k",
        f"{_COMPARE}::test_top_k_is_compared_as_a_set",
    ),
)

QUANTITY = of(
    "parity/engine/measure/quantity.py",
    (
        "cotangents_are_blocks",
        "cotangents are held to the tolerance of intermediates",
        "    Role.COTANGENT: Kind.GRADIENT,\n",
        "    Role.COTANGENT: Kind.BLOCK,\n",
        _COMPARE,
    ),
)

BOUNDS = of(
    "parity/engine/measure/bounds.py",
    (
        "first_row_of_the_edge",
        "a tolerance is read from the first row of the edge and kind, whatever the metric",
        "if row.edge == edge and kind in row.kinds and row.metric == metric:",
        "if row.edge == edge and kind in row.kinds:",
        _COMPARE,
    ),
    (
        "smaller_of_two_bounds",
        "the minimum of an absolute bound and a multiple of the floor",
        "max(row.absolute, row.noise_factor * floor)",
        "min(row.absolute, row.noise_factor * floor)",
        _COMPARE,
    ),
    (
        "floors_of_other_work",
        "a floor calibrated for another case of the same name is used",
        'return entry["responses"] if entry.get("hash") == work.hash else {}',
        'return entry["responses"] if entry else {}',
        f"{_TRIANGLE}::test_a_case_that_changed_loses_its_tolerances",
    ),
)

TOLERANCES = of(
    "parity/megalodon/tolerance_table.py",
    (
        "oracle_may_be_itself",
        "every gate may be exactly 0",
        'metric="exact_share",\n        absolute=0.5,',
        'metric="exact_share",\n        absolute=1.0,',
        "test_controls.py",
    ),
    (
        "float64_gradients_loosened",
        "gradients in float64 may be off by a hundredth",
        'at most 8.5e-14 measured",\n        absolute=1e-10,',
        'at most 8.5e-14 measured",\n        absolute=1e-2,',
        _COMPARE,
    ),
    (
        "bf16_may_equal_autocast",
        "rounding everything to bfloat16 passes",
        'metric="error_over_autocast",\n        absolute=0.85,',
        'metric="error_over_autocast",\n        absolute=1.15,',
        _COMPARE,
    ),
    (
        "bf16_bound_of_a_float",
        "intermediates in bfloat16 are held to a bound eight times as wide",
        "noise_factor=0.6 * 2.0**15,",
        "noise_factor=4.8 * 2.0**15,",
        _COMPARE,
    ),
)

LOCALIZE = (
    *of(
        "parity/engine/measure/localize.py",
        (
            "unstaged_comes_first",
            "a gradient is named before the stage that broke",
            "key=lambda m: (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage), default=None",
            "key=lambda m: (m.verdict is not Verdict.FAIL, m.stage), default=None",
            f"{_VERDICTS} {_LOCALIZE}",
        ),
        (
            "incomparable_comes_first",
            "what could not be compared is named before what failed",
            "key=lambda m: (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage), default=None",
            "key=lambda m: (m.verdict is Verdict.FAIL, m.stage < 0, m.stage), default=None",
            f"{_VERDICTS}::test_what_failed_is_named_before_what_could_not_be_compared",
        ),
        (
            "stage_of_nan_holds",
            "a stage that is no number is not wrong",
            "return not self.forced <= self.tolerance",
            "return self.forced > self.tolerance",
            f"{_LOCALIZE}::test_a_stage_that_is_not_a_number_is_the_culprit",
        ),
        (
            "amplification_inverted",
            "amplification is forced over free",
            "return self.free / self.forced",
            "return self.forced / self.free",
            f"{_LOCALIZE} test_run_commands.py",
        ),
    ),
    *of(
        "parity/engine/measure/deviation.py",
        (
            "best_elements_first",
            "the elements that differ least are called the worst",
            'np.argsort(-apart, kind="stable")[:count]',
            'np.argsort(apart, kind="stable")[:count]',
            "test_deviation.py",
        ),
        (
            "bins_rounded_down",
            "distances are counted in the bin below",
            "level = np.clip(np.ceil(distance), LOW, HIGH + 1)",
            "level = np.clip(np.floor(distance), LOW, HIGH + 1)",
            "test_deviation.py",
        ),
        (
            "unknown_is_equal",
            "elements that are not finite are 0 apart",
            "out=np.full(np.shape(e), math.inf), where=known)",
            "out=np.full(np.shape(e), 0.0), where=known)",
            "test_deviation.py::test_unknown_is_never_equal",
        ),
        (
            "indices_of_the_selection",
            "worst elements are named by their index among the valid rows",
            "if positions is not None:",
            "if positions is None and positions is not None:",
            "test_deviation.py::test_indices_are_those_of_the_whole_tensor",
        ),
    ),
    *of(
        "parity/megalodon/account.py",
        (
            "stages_not_forced",
            "every stage after a bug is called wrong on its own",
            "free, forced = subject.intermediates(case), subject.intermediates(case, exact)",
            "free, forced = subject.intermediates(case), subject.intermediates(case)",
            f"{_LOCALIZE}::test_the_culprit_is_the_stage_that_is_wrong_when_fed_the_right_inputs",
        ),
        (
            "carried_counts_the_broken",
            "stages that are wrong by themselves are reported as carrying an earlier error",
            "tuple(s for s in self.stages if not s.broken and not s.free <= s.tolerance)",
            "tuple(s for s in self.stages if not s.free <= s.tolerance)",
            _LOCALIZE,
        ),
    ),
)

POOLING = of(
    "parity/pooling.py",
    (
        "arithmetic_pool",
        "draws are pooled by their arithmetic mean",
        "math.exp(sum(map(math.log, values)) / len(values))",
        "sum(values) / len(values)",
        "test_pooling.py",
    ),
    (
        "nan_in_a_pool_is_zero",
        "a draw that is no number counts as exact",
        "if not all(math.isfinite(value) for value in values):\n        return math.nan",
        "if not all(math.isfinite(value) for value in values):\n        return 0.0",
        "test_pooling.py",
    ),
    (
        "draws_not_hashed",
        "other draws count as the same work",
        "digest.update(digest_of(one.order, draw.model, draw.inputs).encode())",
        "digest.update(repr(one.order).encode())",
        "test_pooling.py::test_other_draws_are_other_work",
    ),
    (
        "last_replay_counts",
        "a pool repeats if its last draw did",
        "repeats[quantity] &= same",
        "repeats[quantity] = same",
        "test_pooling.py",
    ),
)

CONTROLS = of(
    "parity/faults/controls.py",
    (
        "controls_found_anywhere",
        "a control counts as found wherever anything failed",
        "if found is not None and (found.quantity, found.verdict) == (\n"
        "            control.fault.stage,\n            Verdict.FAIL,\n        ):",
        "if found is not None:",
        "test_controls.py",
    ),
    (
        "controls_not_checked",
        "every control counts as found",
        "if found is not None and (found.quantity, found.verdict) == (\n"
        "            control.fault.stage,\n            Verdict.FAIL,\n        ):",
        "if control.edge:",
        "test_controls.py",
    ),
    (
        "one_control_planted",
        "only the first control is planted",
        "for control in CONTROLS:\n            planted",
        "for control in CONTROLS[:1]:\n            planted",
        "test_controls.py::test_each_control_is_found_on_its_edge",
    ),
    (
        "controls_found_on_any_edge",
        "a control counts as found on another edge than its own",
        "first_divergence(row for row in rows if row.edge == control.edge)",
        "first_divergence(rows)",
        "test_controls.py",
    ),
)

SUITE = of(
    "parity/megalodon/suite.py",
    (
        "oracle_compared_with_itself",
        "float64 compares the oracle with itself",
        "rows = wide.run(self.wide.run(case), exact)",
        "rows = wide.run(exact, exact)",
        "test_controls.py",
        "plain",
    ),
    (
        "oracle_stands_in_for_float32",
        "float32 compares the oracle, rounded, with itself",
        "ours = self.subject.run(case)",
        "ours = {name: np.asarray(a, np.float32) for name, a in exact.items()}",
        "test_controls.py",
        "plain",
    ),
    (
        "exact_share_of_many",
        "the share of gates that are exactly 0 is of a thousand",
        "errors.count(0.0) / len(errors)",
        "errors.count(0.0) / max(len(errors), 1000)",
        "test_controls.py",
    ),
    (
        "reference_held_to_our_padding",
        "the reference is held to an EMA without padding, which is not what it does",
        "as_reference = self._truth(case, False) if differs else exact",
        "as_reference = exact",
        f"{_TRIANGLE}::test_triangle[right_padding]",
        "right_padding",
    ),
    (
        "lost_recording_is_silent",
        "a case without a recording ends without a word",
        "yield not_comparable("
        "case, MegalodonEdge.JAX32_REFERENCE32, str(error), self.device)\n            return",
        "return",
        "test_controls.py::test_a_case_without_a_recording_is_not_comparable",
    ),
    (
        "conversion_not_gated",
        "the round trip of the weights is reported and not gated",
        "yield edge(MegalodonEdge.JAX32_ORACLE).judged(*_converted(round_trip(case), case))",
        "yield edge(MegalodonEdge.JAX32_ORACLE).fact(*_converted(round_trip(case), case))",
        "test_controls.py::test_a_case_without_a_recording_is_not_comparable",
    ),
    (
        "float32_expected_of_float64",
        "the wide side may have come out in float32",
        "case.work, name, floors, name.dtype, self.device,",
        'case.work, name, floors, "float64" if name.startswith("jax") else "float32", self.device,',
        "test_controls.py",
    ),
)

SOURCES = (
    *of(
        "parity/megalodon/conversion.py",
        (
            "last_byte_not_compared",
            "the hash of a converted tensor leaves its last byte out",
            "digest.update(np.ascontiguousarray(array).tobytes())",
            "digest.update(np.ascontiguousarray(array).tobytes()[:-1])",
            "test_conversion.py",
        ),
        (
            "dtype_not_hashed",
            "a tensor that arrives in another dtype has not changed",
            'f"{array.dtype.name} {array.shape} "',
            'f"{array.shape} "',
            "test_conversion.py::test_a_hash_tells_dtype_and_shape_apart",
        ),
        (
            "extra_parameters_unseen",
            "a parameter that nobody sent has not changed",
            "(set(held) | set(given)) - ",
            "set(given) - ",
            "test_conversion.py::test_a_missing_and_an_extra_name_are_changes",
        ),
    ),
    *of(
        "parity/recordings.py",
        (
            "recording_of_other_work",
            "a recording of another case is compared",
            'if provenance["case_hash"] != work:',
            'if not provenance["case_hash"]:',
            "test_sources.py::test_a_recording_of_other_work_is_refused",
        ),
        (
            "recording_of_another_schema",
            "a recording of another schema is read",
            'if provenance.get("schema") != SCHEMA:',
            'if not provenance.get("schema"):',
            "test_sources.py::test_a_recording_of_another_schema_is_refused",
        ),
    ),
    *of(
        "parity/megalodon/recordings.py",
        (
            "recordings_answer_for_cotangents",
            "recordings are assumed to hold quantities that they omit",
            "return what.role is not Role.COTANGENT and not omitted",
            "return what.role is not Role.COTANGENT",
            f"{_TRIANGLE} test_sources.py",
        ),
    ),
    *of(
        "parity/megalodon/known_differences.py",
        (
            "closed_difference_passes",
            "a deliberate difference that disappeared passes",
            "Verdict.PASS if least <= value <= most else",
            "Verdict.PASS if value <= most else",
            "test_known_differences.py",
        ),
        (
            "empty_loss_of_any_reference",
            "a reference whose empty loss became a number passes",
            "return ours if np.isnan(theirs) else math.nan",
            "return ours",
            "test_known_differences.py",
        ),
        (
            "difference_over_padding_too",
            "a difference is measured at padding as well",
            "return relative_l2(ours[case.valid], theirs[case.valid])",
            "return relative_l2(ours, theirs)",
            "test_known_differences.py",
        ),
    ),
    *of(
        "parity/megalodon/trajectory.py",
        (
            "second_moment_corrected_by_beta1",
            "the oracle corrects the second moment with the first one's rate",
            "second = nu[name] / (1 - HYPER.beta2**k)",
            "second = nu[name] / (1 - HYPER.beta1**k)",
            "test_trajectory.py",
            "adamw",
        ),
        (
            "everything_decays",
            "norms and EMA parameters decay like weights, on both of our sides",
            "return role_of(name) is Role.LINEAR",
            "return role_of(name) is not Role.BIAS",
            "test_trajectory.py",
            "adamw",
        ),
        (
            "second_step_repeats",
            "every step after the first sees the same batch",
            "np.roll(a, k, axis=1)",
            "np.roll(a, min(k, 1), axis=1)",
            "test_trajectory.py::test_every_step_sees_another_batch",
        ),
        (
            "epsilon_under_the_root",
            "the oracle adds epsilon under the root",
            "(np.sqrt(second) + HYPER.eps)",
            "np.sqrt(second + HYPER.eps)",
            "test_trajectory.py",
        ),
    ),
    *of(
        "parity/engine/programs/marks.py",
        (
            "forced_stage_goes_on_with_its_own",
            "a forced stage goes on with what it computed",
            "return other if self.on is True else jnp.where(self.on, other, value)",
            "return value",
            f"{_LOCALIZE}::test_a_forced_stage_goes_on_with_what_it_is_given",
        ),
        (
            "layers_counted_from_one",
            "intermediates of the first layer are named after the second",
            "name = self.numbered[mark].format(before)",
            "name = self.numbered[mark].format(before + 1)",
            "test_sources.py::test_capture_changes_no_operation_and_names_every_stage",
            "plain",
        ),
    ),
    *of(
        "parity/engine/measure/rounding_noise.py",
        (
            "sums_rounded_at_every_term",
            "a sum's rounding grows as if every term had the whole of it",
            "math.sqrt(1 + terms / 11)",
            "math.sqrt(1 + terms)",
            _COMPARE,
        ),
        (
            "floor_is_the_largest",
            "a noise floor is the sum of its responses instead of their mean",
            "return math.sqrt(sum(value**2 for value in values) / len(values))",
            "return math.sqrt(sum(value**2 for value in values))",
            _COMPARE,
        ),
    ),
    *of(
        "parity/megalodon/low_precision.py",
        (
            "bf16_intermediates_not_gated",
            "of bfloat16 only the logits are gated",
            "if edge is OURS and name != LOSS:",
            "if edge is OURS and name == LOGITS:",
            "test_low_precision.py",
        ),
        (
            "autocast_over_ours",
            "the ratio is autocast's error over ours",
            "errors[OURS, LOGITS] / errors[AUTOCAST, LOGITS]",
            "errors[AUTOCAST, LOGITS] / errors[OURS, LOGITS]",
            "test_low_precision.py",
        ),
    ),
)

_EXPLANATION = "test_explanation.py"

EXPLANATION = of(
    "parity/megalodon/explanation.py",
    (
        "float32_never_asked",
        "a stage that only float32 shows is not explained",
        'narrow = account(case, "float32")',
        'narrow = account(case, "float64")',
        _EXPLANATION,
    ),
    (
        "culprits_are_carried",
        "a stage that is wrong on its own is counted as carried",
        "sum(not s.broken and not s.free <= s.tolerance",
        "sum(not s.free <= s.tolerance",
        _EXPLANATION,
    ),
    (
        "derivatives_before_stages",
        "a wrong loss is named before the stage that made it wrong",
        "    if wide.culprit is not None:",
        "    if wide.culprit is not None and failure(case) is None:",
        _EXPLANATION,
    ),
    (
        "moments_change_meaning",
        "a wrong first moment is explained as a wrong second one",
        'if moment == ("1", "mu"):',
        'if moment == ("1", "nu"):',
        _EXPLANATION,
    ),
    (
        "later_steps_are_the_first",
        "an error of later steps is reported as one of the first step",
        'if moment == ("1", "drift"):',
        "if moment:",
        _EXPLANATION,
    ),
    (
        "cotangents_are_values",
        "a wrong cotangent is explained as a wrong value",
        "if quantity.role is Role.COTANGENT:",
        "if False:",
        _EXPLANATION,
    ),
    (
        "edge_of_float64_always",
        "an error found in float32 is reported as one in float64",
        'wide = report.dtype == "float64"',
        "wide = True",
        _EXPLANATION,
    ),
)

SHRINK = of(
    "parity/megalodon/shrink.py",
    (
        "the_same_case_again",
        "a case that cannot shrink is tried for ever",
        "if change in held or candidate == case:",
        "if change in held:",
        "test_localize.py::test_a_case_that_always_fails_shrinks_to_the_end_and_its_code_runs",
    ),
    (
        "streams_keep_their_length",
        "the calls of a stream do not get shorter",
        "if max(case.cuts) > 1:",
        "if False:",
        "test_localize.py::test_a_case_that_always_fails_shrinks_to_the_end_and_its_code_runs",
    ),
)

YARDSTICK = of(
    "parity/engine/programs/yardstick.py",
    (
        "float32_is_a_yardstick",
        "what users run in float32 is compiled without optimisation",
        "if yardstick else {}",
        "if yardstick is not None else {}",
        "test_yardstick.py",
    ),
    (
        "yardstick_compiled_in_full",
        "float64 is compiled as dearly as what users run",
        "if yardstick else {}",
        "if yardstick is None else {}",
        "test_yardstick.py",
    ),
    (
        "gone_option_stops_all",
        "an option that XLA no longer has stops every comparison",
        "if unknown is None or options.pop(unknown[1], None) is None:",
        "if True:",
        "test_yardstick.py",
    ),
    (
        "level_that_gpus_have_not",
        "unoptimised code is requested for a GPU, whose compiler does not make it",
        'if backend != "cpu":',
        'if backend == "cpu":',
        "test_yardstick.py",
    ),
)

MUTANTS = (
    *(*EXPLANATION, *SHRINK, *YARDSTICK),
    *(*COMPARE, *METRICS, *QUANTITY, *BOUNDS, *TOLERANCES, *LOCALIZE, *POOLING),
    *(*CONTROLS, *SUITE, *SOURCES),
)
