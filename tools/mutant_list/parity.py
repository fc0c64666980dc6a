"""Mutants of `parity`: one for each module with logic that can be wrong."""

from __future__ import annotations

from tools.mutant_list.mutant import of

MUTANTS = (
    *of(
        "parity/engine/programs/rounding.py",
        (
            "roots_of_negative_numbers_mended",
            "an operand outside of the domain is reflected also where nothing perturbs it",
            "return [jnp.where(perturbs, x, y) for x, y in zip(kept, operands, strict=True)]",
            "return kept",
            "test_domains.py test_healthy_operations.py",
        ),
    ),
    *of(
        "parity/engine/programs/operations.py",
        (
            "any_mark_ends_a_window",
            "a mark without a partner hides the operations before it",
            "if index == last or not self.operations[index].fed:",
            "if index == last or self.operations[index].mark is None:",
            "test_searches_by_hand.py test_lines_in_loops.py",
        ),
    ),
    *of(
        "parity/deepseek_v3/attention.py",
        (
            "mla_absorbed_scale",
            "absorbed scores are scaled by the head's width, without YaRN's factor",
            "(plain.astype(wide) + rotary.astype(wide)) * self.config.score_scale",
            "(plain.astype(wide) + rotary.astype(wide)) * (\n"
            "            self.config.qk_head_dim**-0.5 if absorbed else self.config.score_scale\n"
            "        )",
            "test_model.py::test_absorbed_is_expanded test_model.py",
        ),
    ),
    *of(
        "parity/deepseek_v3/model.py",
        (
            "experts_weighed_out_of_order",
            "outputs of experts are weighed in the order of tokens, not of experts",
            "routing.weights.reshape(-1)[order][:, None]",
            "routing.weights.reshape(-1)[:, None]",
            "test_model.py::test_sorted_experts_are_all_experts_masked",
        ),
    ),
    *of(
        "parity/deepseek_v3/router.py",
        (
            "router_bias_in_the_weights",
            "the selection bias enters the weights of the experts",
            "weights = jnp.take_along_axis(scores, chosen, axis=-1)",
            "weights = jnp.take_along_axis(scores + self.bias(scores.dtype), chosen, axis=-1)",
            "test_model.py::test_the_selection_bias_is_no_part_of_a_weight",
        ),
    ),
    *of(
        "parity/engine/measure/bounds.py",
        (
            "bound_is_a_sum",
            "a bound is the sum of its parts, not the larger",
            "max(row.absolute, row.noise_factor * floor)",
            "row.absolute + row.noise_factor * floor",
            "test_compare.py test_rounding_floors.py",
        ),
    ),
    *of(
        "parity/engine/measure/compare.py",
        (
            "missing_gradient_left_out",
            "a gradient that is missing is left out of the ratio of all",
            "float(np.sqrt(np.mean(np.square(e))))",
            "float(np.sqrt(np.nanmean(np.square(e))))",
            "test_compare.py test_rounding_floors.py test_cancelled_derivatives.py",
        ),
    ),
    *of(
        "parity/engine/measure/constants.py",
        (
            "constant_on_one_side",
            "what is constant on one side alone is no gate",
            "if is_constant(one[name]) and is_constant(other[name])",
            "if is_constant(one[name]) or is_constant(other[name])",
            "test_metrics_by_hand.py test_what_was_compared.py",
        ),
    ),
    *of(
        "parity/engine/measure/contract.py",
        (
            "contract_without_metrics",
            "a gate of another metric stands for the planned one",
            'f"{gate.quantity}\\t{gate.metric}" for gate in gates',
            "gate.quantity for gate in gates",
            "test_contract.py::test_another_gate_does_not_stand_for_a_planned_one",
        ),
    ),
    *of(
        "parity/engine/measure/deviation.py",
        (
            "tensors_kept_by_case",
            "all edges of a case share one allowance of described tensors",
            "        self.seen[m.case, m.edge] += 1\n        if self.seen[m.case, m.edge] > KEPT",
            '        self.seen[m.case, ""] += 1\n        if self.seen[m.case, ""] > KEPT',
            "test_deviation.py test_page_data.py",
        ),
    ),
    *of(
        "parity/engine/measure/localize.py",
        (
            "not_comparable_before_failing",
            "a difference starts at what could not be compared although something fails",
            "key=lambda m: (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage)",
            "key=lambda m: (m.stage < 0, m.stage)",
            "test_verdicts.py::test_what_failed_is_named_before_what_could_not_be_compared",
        ),
    ),
    *of(
        "parity/engine/measure/measurement.py",
        (
            "pass_of_nan_believed",
            "a pass whose value is no number is believed",
            "holds = math.isfinite(self.value) and 0.0 <= self.value <= self.tolerance",
            "holds = not self.value > self.tolerance",
            "test_verdicts.py::test_a_pass_that_its_numbers_do_not_support_fails",
        ),
    ),
    *of(
        "parity/engine/measure/metrics.py",
        (
            "flips_by_twice_the_bound",
            "the margin that a flip needs is sqrt(2) too wide",
            "math.sqrt(2) * bound * np.linalg.norm(e, axis=-1)",
            "2 * bound * np.linalg.norm(e, axis=-1)",
            "test_compare.py::test_a_flip_counts_where_the_tolerance_cannot_explain_it",
        ),
    ),
    *of(
        "parity/engine/measure/quantity.py",
        (
            "cotangents_are_blocks",
            "cotangents are held to the tolerance of intermediates",
            "    Role.COTANGENT: Kind.GRADIENT,\n",
            "    Role.COTANGENT: Kind.BLOCK,\n",
            "test_compare.py",
        ),
    ),
    *of(
        "parity/engine/measure/rounding_noise.py",
        (
            "sum_without_its_terms",
            "the rounding of the terms themselves is left out",
            "return UNIT_ROUNDOFF * math.sqrt(1 + terms / 11)",
            "return UNIT_ROUNDOFF * math.sqrt(terms / 11)",
            "test_compare.py test_pooling.py",
        ),
    ),
    *of(
        "parity/engine/measure/where.py",
        (
            "right_elements_are_culprits",
            "without room elements that are right break the tolerance",
            "wrong[order[np.cumsum(squares[order]) > room]] = True",
            "wrong[order[np.cumsum(squares[order]) >= room]] = True",
            "test_where.py test_deviation.py test_every_element.py",
        ),
    ),
    *of(
        "parity/engine/pairing/alignment.py",
        (
            "order_among_unequal_counts",
            "stages are paired by their place where one side has more of them",
            "if len(rows) == len(columns) and all(free[c] and diverged[c] for c in cells):",
            "if all(free[c] and diverged[c] for c in cells):",
            "test_alignment.py test_returned.py",
        ),
    ),
    *of(
        "parity/engine/pairing/closeness.py",
        (
            "masks_in_the_scale",
            "masks drown the numbers beside them",
            "scale = _norm(e[np.abs(e) < MASKED])",
            "scale = _norm(e)",
            "test_alignment.py",
        ),
    ),
    *of(
        "parity/engine/pairing/conventions.py",
        (
            "vector_is_near_nothing",
            "a vector is no merged matrix of its size",
            "or min(map(len, wide)) == 1 else",
            "or min(map(len, wide)) == 0 else",
            "test_metrics_by_hand.py test_proposal.py",
        ),
    ),
    *of(
        "parity/engine/pairing/fingerprints.py",
        (
            "minus_zero_is_another_value",
            "an array with -0 for 0 has another fingerprint",
            "(chunk + 0.0).view(np.uint64)",
            "chunk.copy().view(np.uint64)",
            "test_layouts.py::test_minus_zero_is_zero",
        ),
    ),
    *of(
        "parity/engine/pairing/irregularities.py",
        (
            "row_lies_in_two_ways",
            "a matrix whose one side is 1 is odd where its neighbours are transposed",
            "sum(n > 1 for n in pair.construction.shape) > 1",
            "sum(n > 1 for n in pair.construction.shape) >= 1",
            "test_irregularities.py",
        ),
    ),
    *of(
        "parity/engine/pairing/layouts.py",
        (
            "layout_back_by_the_same_axes",
            "the inverse layout permutes axes as the layout does",
            "int(axis) for axis in np.argsort(self.axes))",
            "int(axis) for axis in self.axes)",
            "test_layouts.py::test_a_layout_is_found_named_and_inverted",
        ),
    ),
    *of(
        "parity/engine/pairing/matching.py",
        (
            "rounded_is_equal_silently",
            "weights that went through bfloat16 are matched without a note",
            'note = f"the {{}} holds values rounded to {dtype.name}"',
            'note = ""',
            "test_matching.py",
        ),
    ),
    *of(
        "parity/engine/pairing/naming.py",
        (
            "first_matrix_is_the_second",
            "the first matrix of a feed-forward block is taken for the one that goes down",
            '"fc_in": "up projection",',
            '"fc_in": "down projection",',
            "test_names_by_model.py",
        ),
    ),
    *of(
        "parity/engine/pairing/parameter_pairs.py",
        (
            "gradient_of_the_last_use",
            "of parameters made of one of the original the last use's gradient counts",
            "sums[name] + value if name in sums else value",
            "value",
            "test_matching.py::test_gradients_of_tied_copies_are_summed",
        ),
    ),
    *of(
        "parity/engine/pairing/resemblance.py",
        (
            "nan_on_both_sides_differs",
            "where both arrays hold NaN they count as different",
            "differs = (x != y) & ~((x != x) & (y != y))",
            "differs = x != y",
            "test_matching.py::test_what_is_no_number_on_both_sides_does_not_differ",
        ),
    ),
    *of(
        "parity/engine/pairing/stage_names.py",
        (
            "learned_across_layers",
            "pairs of other layers teach which names belong together",
            "        if n == m:\n            votes",
            "        if n is not None:\n            votes",
            "test_alignment.py",
        ),
    ),
    *of(
        "parity/engine/pairing/value_search.py",
        (
            "whole_numbers_are_rounded_too",
            "an array that a narrow dtype cannot be narrower than is cast to it and back",
            "if self.rounding is None or not self.rounds(name, self.rounding):",
            "if self.rounding is None:",
            "test_values_by_model.py",
        ),
    ),
    *of(
        "parity/engine/programs/evaluation.py",
        (
            "turns_of_a_reverse_scan_forwards",
            "marks of a reversed loop are in the order of turns, not of execution",
            'range(length)[:: -1 if p["reverse"] else 1]',
            "range(length)",
            "test_evaluation.py::test_a_mark_is_seen_wherever_it_is_and_changes_no_bit",
        ),
    ),
    *of(
        "parity/engine/programs/exits.py",
        (
            "caught_exit_forgotten",
            "an os._exit that the code itself catches goes unnoticed",
            "        yield\n        if raised:\n            raise raised[0]\n",
            "        yield\n",
            "test_what_was_compared.py test_pytest_plugin.py test_port_command.py",
        ),
    ),
    *of(
        "parity/engine/programs/marks.py",
        (
            "forced_stage_goes_on_with_its_own",
            "a forced stage goes on with what it computed",
            "return other if self.on is True else jnp.where(self.on, other, value)",
            "return value",
            "test_localize.py::test_a_forced_stage_goes_on_with_what_it_is_given",
        ),
    ),
    *of(
        "parity/engine/programs/operations.py",
        (
            "call_never_ends",
            "operations after a call are attributed to its body",
            "        self._calls.pop()",
            "        pass",
            "test_searches_by_hand.py",
        ),
    ),
    *of(
        "parity/engine/programs/rounding.py",
        (
            "rounding_keeps_angles",
            "rounding moves the modulus of a complex number alone",
            "jax.lax.complex(moves, self._draw(value.shape))",
            "jax.lax.complex(moves, 0 * moves)",
            "test_complex.py",
        ),
    ),
    *of(
        "parity/engine/programs/rounding_rules.py",
        (
            "cumulative_sum_of_one_term",
            "a cumulative sum rounds as if it had one term",
            'if name.startswith("cum"):',
            'if name == "cumprod":',
            "test_evaluation.py::test_a_running_sum_of_many_terms_responds_more_than_one_of_few",
        ),
    ),
    *of(
        "parity/engine/programs/yardstick.py",
        (
            "float32_is_a_yardstick",
            "what users run in float32 is compiled without optimisation",
            "if yardstick else {}",
            "if yardstick is not None else {}",
            "test_yardstick.py",
        ),
    ),
    *of(
        "parity/executors/cluster.py",
        (
            "one_retry_too_many",
            "an item may kill one worker more on a cluster than here",
            '"max_retries": ATTEMPTS - 1,',
            '"max_retries": ATTEMPTS,',
            "test_executors.py::test_an_item_may_kill_as_many_workers_on_a_cluster_as_here",
        ),
    ),
    *of(
        "parity/executors/identity.py",
        (
            "empty_variable_is_a_setting",
            "a variable that is empty tells two processes apart",
            "if value and name.startswith(PREFIXES)",
            "if name.startswith(PREFIXES)",
            "test_item_inputs.py::test_settings_are_the_variables_that_change_numbers",
        ),
    ),
    *of(
        "parity/executors/inputs.py",
        (
            "files_without_names",
            "a renamed file is no change of content",
            'f"{relative}\\0{digest_of_file(files[relative])}\\n"',
            'f"{digest_of_file(files[relative])}\\n"',
            "test_item_inputs.py::test_another_content_at_the_same_path_is_another_input",
        ),
    ),
    *of(
        "parity/executors/interrupts.py",
        (
            "only_leaders_end",
            "a worker that leads no group yet is not ended",
            "for kill in (os.killpg, os.kill):",
            "for kill in (os.killpg,):",
            "test_interrupts.py test_kills.py",
        ),
    ),
    *of(
        "parity/executors/item.py",
        (
            "changes_during_an_item_unseen",
            "code or inputs that changed while an item ran are not noticed",
            "if name else {}\n        _check_alike(item, expected, place.node)\n",
            "if name else {}\n",
            "test_item_inputs.py::test_an_input_that_changes_while_an_item_runs_makes_no_answer",
        ),
    ),
    *of(
        "parity/executors/local.py",
        (
            "memory_of_the_smallest",
            "as many processes as the smallest items leave room for",
            "memory = max(item.needs.memory for item in items)",
            "memory = min(item.needs.memory for item in items)",
            "test_executors.py::test_as_many_processes_as_memory_and_processors_allow",
        ),
        (
            "each_share_a_device_of_its_own",
            "items that share accelerators are given one each, also where there is one",
            "first = slot % len(devices) if width < 1 else slot * count",
            "first = slot * count",
            "test_executors_by_hand.py::test_each_worker_on_accelerators_sees_its_own",
        ),
    ),
    *of(
        "parity/executors/pace.py",
        (
            "estimate_below_zero",
            "items that take longer than expected make the estimate smaller",
            "max(takes[n] - ages[n], ages[n] / LATE) for n in takes",
            "takes[n] - ages[n] for n in takes",
            ""
            "test_executors.py::test_progress_says_who_is_at_what_what_was_slowest_and_how_long_it_takes",
        ),
    ),
    *of(
        "parity/executors/progress.py",
        (
            "deaths_not_worth_a_line",
            "of a large sweep an item that killed a worker gets no line",
            "well = answer.state is State.DONE and answer.attempts == 1",
            "well = answer.state is State.DONE",
            "test_executors.py",
        ),
    ),
    *of(
        "parity/executors/supervision.py",
        (
            "forks_record_too",
            "a fork of the command records that the command ended",
            "        if pid == os.getpid():\n",
            "        if pid:\n",
            "test_supervision.py",
        ),
    ),
    *of(
        "parity/executors/sweep.py",
        (
            "answers_as_they_came",
            "answers are in the order in which they came",
            "return [known[item.name] for item in items]",
            "return list(known.values())",
            ""
            "test_executors.py::test_a_sweep_of_which_every_answer_is_needed_names_those_it_has_not",
        ),
    ),
    *of(
        "parity/faults/controls.py",
        (
            "controls_found_anywhere",
            "a control counts as found wherever anything failed",
            "if found is not None and (found.quantity, found.verdict) == (\n"
            "            control.fault.stage,\n            Verdict.FAIL,\n        ):",
            "if found is not None:",
            "test_controls.py",
        ),
    ),
    *of(
        "parity/megalodon/conversion.py",
        (
            "last_byte_not_compared",
            "the hash of a converted tensor leaves its last byte out",
            "digest.update(np.ascontiguousarray(array).tobytes())",
            "digest.update(np.ascontiguousarray(array).tobytes()[:-1])",
            "test_conversion.py",
        ),
    ),
    *of(
        "parity/megalodon/explanation.py",
        (
            "float32_never_asked",
            "a stage that only float32 shows is not explained",
            'narrow = account(case, "float32")',
            'narrow = account(case, "float64")',
            "test_explanation.py",
        ),
    ),
    *of(
        "parity/megalodon/lines.py",
        (
            "padding_blamed_for_all",
            "padding is blamed for a stage that is wrong without it too",
            "if not relative_l2(values[max(operations)], exact[stage]) <= SAME:",
            "if not operations:",
            "test_lines.py",
        ),
    ),
    *of(
        "parity/megalodon/stream_lines.py",
        (
            "stream_of_one_call",
            "the call that left a wrong cache is not traced",
            "CALLS = 2",
            "CALLS = 1",
            "test_stream_lines.py",
        ),
        (
            "stream_begins_at_the_first_call",
            "the stages of a call are compared with the tokens of another",
            "i - calls.start): x[:, cuts[i]]",
            "i - calls.start): x[:, cuts[i - calls.start]]",
            "test_stream_lines.py",
        ),
    ),
    *of(
        "parity/megalodon/explanation.py",
        (
            "lines_of_a_stream_lent",
            "the lines of a stream are given to a stage that has the name of its quantity",
            "(o for o in others if o.culprit and o.lines and ",
            "(o for o in others if o.lines and ",
            "test_stream_lines.py",
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
    ),
    *of(
        "parity/megalodon/suite.py",
        (
            "oracle_compared_with_itself",
            "float64 compares the oracle with itself",
            "rows = wide.run(self.wide.run(case), exact)",
            "rows = wide.run(exact, exact)",
            "test_controls.py",
            "plain",
        ),
    ),
    *of(
        "parity/megalodon/tolerance_table.py",
        (
            "oracle_may_be_itself",
            "every gate may be exactly 0",
            'metric="exact_share",\n        absolute=0.5,',
            'metric="exact_share",\n        absolute=1.0,',
            "test_controls.py",
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
    ),
    *of(
        "parity/mesh/comparison.py",
        (
            "replicas_not_compared",
            "copies of a value may differ from device to device",
            'rows.append(comparison.judged(n, "replicas", float(differing)))',
            'rows.append(comparison.judged(n, "replicas", 0.0))',
            "test_mesh_comparison.py test_placement.py",
        ),
    ),
    *of(
        "parity/pooling.py",
        (
            "arithmetic_pool",
            "draws are pooled by their arithmetic mean",
            "math.exp(sum(map(math.log, values)) / len(values))",
            "sum(values) / len(values)",
            "test_pooling.py",
        ),
    ),
    *of(
        "parity/port/compare.py",
        (
            "fresh_parameter_is_lost",
            "a constant that no derivative reaches counts as a parameter the port lacks",
            "if np.any(gradients.get(name, 0)) and _of_the_original(name) not in rounding",
            "if _of_the_original(name) not in rounding",
            ""
            "test_port_compare.py::test_without_derivatives_a_fresh_parameter_is_noticed_and_not_called_missing",
        ),
    ),
    *of(
        "parity/port/consequences.py",
        (
            "two_quantities_by_value",
            "a stage that was paired by its value and is wrong is taken for another quantity",
            "if culprit is None or pair is None or not _may_be_two(pair, outputs):",
            "if culprit is None or pair is None:",
            "test_consequences.py::test_only_a_pair_of_a_name_that_differs_much_may_be_two_quantities",
        ),
    ),
    *of(
        "parity/port/correspondence.py",
        (
            "stages_that_were_not_computed",
            "a side that computes less than was aligned ends the comparison",
            "            for pair in self.alignment.pairs\n"
            "            if pair.original in original\n",
            "            for pair in self.alignment.pairs\n",
            "test_scripted_sides.py",
        ),
    ),
    *of(
        "parity/port/exact.py",
        (
            "one_partner_of_two_results",
            "two results of the original are compared with one of the port",
            "            rest.remove(other)\n",
            "",
            "test_what_was_compared.py::test_whole_numbers_pair_by_name_then_by_shape",
        ),
    ),
    *of(
        "parity/port/hidden.py",
        (
            "squares_of_the_last_seed",
            "the noise floor of elements is that of one seed, over their number",
            "                self.sums[name] += square",
            "                self.sums[name] = square",
            "test_hidden_elements.py test_port_compare.py",
        ),
    ),
    *of(
        "parity/port/ledger.py",
        (
            "note_is_a_gate",
            "a row that was no gate counts as compared",
            "if not any(_is_gate(row) for row in found):",
            "if not found:",
            "test_what_was_compared.py::test_agreement_of_nothing_does_not_hold",
        ),
    ),
    *of(
        "parity/port/localisation.py",
        (
            "fed_with_masks_of_the_original",
            "the port is fed the masks of the original as numbers",
            "if pair.port in port.masked or pair.original in original.masked",
            "if pair.port in port.masked",
            "test_tables_and_masks.py::test_a_stage_with_masks_on_either_side_is_not_fed",
        ),
    ),
    *of(
        "parity/port/narrow.py",
        (
            "narrow_nan_without_floors",
            "a NaN in bfloat16 fails nothing where rounding was not measured",
            "if floors or math.isnan(stage.port):",
            "if floors:",
            "test_nan_under_rounding.py",
        ),
    ),
    *of(
        "parity/port/report.py",
        (
            "layer_1_is_in_layer_10",
            "a parameter of layers.1 is first used in layers.10",
            ' + r"(?![A-Za-z0-9_])")',
            ")",
            "test_derivative_order.py",
        ),
    ),
    *of(
        "parity/port/rounding_floors.py",
        (
            "unknown_floor_is_zero",
            "a side without a floor of a stage rounds nothing",
            "each.get(name, math.nan) for each in floors",
            "each.get(name, 0.0) for each in floors",
            "test_rounding_floors.py::test_what_one_side_did_not_measure_has_no_floor_on_either",
        ),
    ),
    *of(
        "parity/port/side_runs.py",
        (
            "integers_may_vary",
            "whole numbers that differ between two runs are not noticed",
            "(self.narrow.stages | self.narrow.exact).items()",
            "self.narrow.stages.items()",
            ""
            "test_what_was_compared.py::test_a_side_that_returns_other_whole_numbers_each_time_is_not_deterministic",
        ),
    ),
    *of(
        "parity/port/conversion.py",
        (
            "untransposed_whatever_follows",
            "a matrix is named as not transposed although the stage fails with it transposed",
            "found = [name for name in tried if holds([name])]",
            "found = [*tried]",
            "test_misconverted.py",
        ),
    ),
    *of(
        "parity/sides/same_inputs.py",
        (
            "inputs_of_one_name_only",
            "what one side got by place is not compared",
            "alone = len(like) == len(rivals) == 1 and (_by_place(name) or _by_place(like[0]))",
            "alone = False",
            "test_captured.py",
        ),
    ),
    *of(
        "parity/sides/torch_lift.py",
        (
            "torch_casts_stay_narrow",
            "what a module casts to float32 inside is float32 in its float64 run",
            "        return WIDE.get(x, x)",
            "        return x",
            "test_torch_side.py",
        ),
    ),
    *of(
        "parity/sides/torch_side.py",
        (
            "stages_are_views",
            "a stage is what an operation in place made of it later",
            "stages[unique] = _pairs(x.detach()).clone()",
            "stages[unique] = _pairs(x.detach())",
            "test_torch_side.py",
        ),
    ),
)
