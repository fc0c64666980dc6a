"""Mutants that were planted blind: written from the source alone, before any test was read."""

from __future__ import annotations

from tools.mutant_list.mutant import of

REPORTS_VERDICT_DECIDE = of(
    "reports/verdict/decide.py",
    (
        "missing_suites_of_the_other_reference",
        "live suites are excused in a live night after a recorded one, and asked of a recorded one",
        '(now, then) == ("recorded", "live")',
        '(now, then) == ("live", "recorded")',
        "test_verdicts.py::test_what_asks_the_live_reference_is_not_missed_where_recordings_answer",
    ),
)
REPORTS_VERDICT_NOISE = of(
    "reports/verdict/noise.py",
    (
        "step_within_the_floor_of_what_was_seen",
        "a value just beyond all that was seen counts as one that never was",
        "now > max(logs) + floor or now < min(logs) - floor",
        "now > max(logs) or now < min(logs)",
        "test_rates.py::test_a_step_is_far_and_unseen",
    ),
)
REPORTS_VERDICT_LEVELS = of(
    "reports/verdict/levels.py",
    (
        "level_never_floored",
        "gates are counted as floored after they were raised to the floor: none ever is",
        "for value, floor in zip(raw, floors, strict=True)),",
        "for value, floor in zip(values, floors, strict=True)),",
        "test_hosts.py::test_a_loosened_tolerance_is_no_drift",
    ),
    (
        "level_of_eight_values",
        "one value more than RECENT, today's not counted",
        "earlier[1 - RECENT :]",
        "earlier[-RECENT:]",
        "test_hosts.py::test_what_does_not_repeat_counts_with_its_newest_values_and_is_pinned_at_its_largest",
    ),
    (
        "jackknife_divides_by_all_draws",
        "the mean without one draw divides by all of them",
        "(sum(gate) - gate[i]) / (draws - 1)",
        "(sum(gate) - gate[i]) / draws",
        "test_spreads.py::test_over_draws_it_is_the_deviation_of_their_mean",
    ),
)
REPORTS_VERDICT_DRIFT = of(
    "reports/verdict/drift.py",
    (
        "pin_of_another_reference_preferred",
        "of other machines' pins one of another kind of reference is preferred",
        "others.sort(key=lambda g: g.environment.reference.kind != kind)",
        "others.sort(key=lambda g: g.environment.reference.kind == kind)",
        "test_hosts.py::test_of_other_machines_one_with_the_same_reference_is_preferred_then_the_newest",
    ),
    (
        "rescaled_by_the_new_level_alone",
        "a pinned level that rested on its tolerances is compared although they changed",
        "and then.floored + level.floored:",
        "and level.floored:",
        "test_hosts.py::test_a_level_that_rested_on_another_tolerance_has_no_ratio",
    ),
)
REPORTS_STORE_SHARED = of(
    "reports/store/shared.py",
    (
        "shorter_object_taken",
        "an object that is shorter than listed becomes part of the copy",
        "if (aside / file).stat().st_size != size:",
        "if (aside / file).stat().st_size > size:",
        "test_lost_replies.py::test_a_half_fetched_run_is_no_run_of_the_copy",
    ),
)
REPORTS_STORE_SENDING = of(
    "reports/store/sending.py",
    (
        "sent_by_name_not_by_size",
        "a truncated object counts as sent",
        "sizes.items() <= there.items()",
        "sizes.keys() <= there.keys()",
        "test_claims.py::test_a_file_that_the_storage_cut_short_is_not_there",
    ),
)
REPORTS_STORE_INDEX = of(
    "reports/store/index.py",
    (
        "signature_without_time_of_status",
        "a file whose time of modification was set back counts as unchanged",
        'times = f"{status.st_mtime_ns}.{status.st_ctime_ns}"',
        'times = f"{status.st_mtime_ns}"',
        "test_index.py::test_a_run_that_changed_is_checked_again",
    ),
)
REPORTS_STORE_GATHERED = of(
    "reports/store/gathered.py",
    (
        "compacted_with_what_was_replaced",
        "values of a changed or deleted run stay in the compacted file",
        "tables.append(table.filter(kept))",
        "tables.append(table)",
        "test_attacks.py::test_values_that_were_gathered_anew_are_kept_once",
    ),
)
REPORTS_STORE_EXAMINE = of(
    "reports/store/examine.py",
    (
        "negative_value_passes_in_lists",
        "a list counts a gate with a value below 0 as passed",
        "np.isfinite(value) & (value <= tolerance) & (value >= 0)",
        "np.isfinite(value) & (value <= tolerance)",
        "test_index.py::test_the_index_judges_a_row_as_a_run_does",
    ),
)
REPORTS_STORE_MANIFEST = of(
    "reports/store/manifest.py",
    (
        "selected_run_is_whole",
        "a night of a few cases counts as whole",
        "not (self.fault or self.selected)",
        "not self.fault",
        "test_hosts.py::test_the_anchor_is_the_oldest_healthy_night_and_does_not_follow",
    ),
)
REPORTS_STORE_UNSENT = of(
    "reports/store/unsent.py",
    (
        "unsent_run_locked_after_it_moved",
        "a run that another process sent meanwhile is taken to be there",
        "yield _lock(handle) and _is(handle, folder)",
        "yield _lock(handle)",
        "test_claims.py::test_a_run_that_was_sent_meanwhile_is_not_sent",
    ),
)
REPORTS_STORE_OBJECTS = of(
    "reports/store/objects.py",
    (
        "run_being_deleted_is_listed",
        "a run whose deletion was interrupted is a run",
        'n for n in listed if n[0] != "." and f"{GONE}{n}" not in listed',
        'n for n in listed if n[0] != "."',
        "test_lost_replies.py::test_a_deletion_killed_at_any_request_leaves_no_run_with_files_missing",
    ),
    (
        "abandoned_by_its_first_object",
        "a writer that still sends is taken for a dead one by its first object",
        "return max((again(lambda p=path: self.files.modified(p))",
        "return min((again(lambda p=path: self.files.modified(p))",
        "test_claims.py::test_an_unfinished_run_goes_when_nothing_came_for_an_hour",
    ),
)
REPORTS_REGISTRY_LOOKUP = of(
    "reports/registry/lookup.py",
    (
        "damaged_run_of_the_same_second",
        "a damaged run made in the same second as the newest is passed over",
        "manifest.created >= created and not copied",
        "manifest.created > created and not copied",
        "test_attacks.py::test_another_run_of_the_same_id_is_no_copy",
    ),
    (
        "account_of_another_case",
        "accounts of other cases are given as that of the first failure",
        "[e for e in run.explanations if e.case == first.case and e.culprit]",
        "[e for e in run.explanations if e.culprit]",
        "test_store_commands.py::test_a_verdict_is_explained_by_the_account_of_its_own_case",
    ),
)
REPORTS_REGISTRY_RETENTION = of(
    "reports/registry/retention.py",
    (
        "anchor_of_a_broken_night",
        "the anchor to keep is that of the newest night even if it is not whole",
        " and run.manifest.whole:",
        ":",
        "test_evidence.py::test_the_anchor_that_is_spared_is_that_of_the_newest_whole_night",
    ),
    (
        "baseline_of_the_oldest",
        "the baseline of the oldest run is kept in place of the newest one's",
        "load_history(root, read_run(runs[-1].folder)).baseline",
        "load_history(root, read_run(runs[0].folder)).baseline",
        "test_store_commands.py::test_pruning_spares_what_others_are_held_against",
    ),
    (
        "first_anchor_goes",
        "the only run of a machine, which anchors its next one, may be deleted",
        "anchors_of(root, read, pinned) or (read,)",
        "anchors_of(root, read, pinned)",
        "test_hosts.py::test_the_anchor_is_the_oldest_healthy_night_and_does_not_follow",
    ),
)
REPORTS_REGISTRY_LOOKBACK = of(
    "reports/registry/lookback.py",
    (
        "latest_of_all_subjects_together",
        "the newest runs of one subject hide those of another",
        "by_subject.setdefault(manifest.subject, [])",
        "by_subject.setdefault(frozenset(), [])",
        "test_attacks.py::test_gates_of_every_subject_are_listed_whoever_ran_last",
    ),
    (
        "oldest_identity_followed",
        "of a gate that changed its work the old work is followed",
        "arg_max(identity, created) AS identity",
        "arg_min(identity, created) AS identity",
        "test_store_commands.py::test_history_lists_the_gates_that_use_most_of_their_tolerance_first",
    ),
)
REPORTS_REGISTRY_PIN = of(
    "reports/registry/pin.py",
    (
        "levels_that_fell_come_last",
        "the diff of a pin lists levels by growth and not by size of the move",
        "key=lambda g: (-max(moved[g], 1 / moved[g]), g)",
        "key=lambda g: (-moved[g], g)",
        "test_store_commands.py::test_the_diff_of_a_pin_lists_the_largest_move_first_up_or_down",
    ),
)
REPORTS_REGISTRY_OUTCOME = of(
    "reports/registry/outcome.py",
    (
        "judged_by_what_was_there_before",
        "runs that others stored during the night are no part of its history",
        "        refresh(folder.parent)\n",
        "",
        "test_shared.py::test_a_run_is_judged_by_what_others_stored_while_it_was_measured",
    ),
)
REPORTS_NIGHTLY_PYTEST_SESSION = of(
    "reports/nightly/pytest_session.py",
    (
        "order_of_workers_names_cases",
        "which test keeps a case's name depends on which worker answers first",
        "sorted(records, key=lambda record: record[0])",
        "records",
        "test_pytest_plugin.py::test_a_key_that_two_tests_measure_is_kept_from_both",
    ),
    (
        "recorded_nothing_is_executed",
        "a test that recorded nothing counts as executed",
        "executed = self.called & (recorded | self.failed)",
        "executed = self.called",
        "test_pytest_plugin.py::test_what_was_planned_and_not_measured_is_incomplete",
    ),
    (
        "plan_of_the_last_worker",
        "the plan is that of the worker that ended last",
        "self.planned |= set(output[_PLANNED])",
        "self.planned = set(output[_PLANNED])",
        "test_pytest_plugin.py::test_a_worker_that_dies_loses_its_test_and_is_red",
    ),
    (
        "skipped_module_is_no_gap",
        "a module that skipped itself leaves no gap",
        "if report.failed or report.skipped:\n            how",
        "if report.failed:\n            how",
        "test_pytest_plugin.py::test_what_was_planned_and_not_measured_is_incomplete",
    ),
)
REPORTS_NIGHTLY_SHARDS = of(
    "reports/nightly/shards.py",
    (
        "shards_of_other_commits",
        "shards without a digest of their code are merged across commits",
        '("code",) if one.manifest.code and other.manifest.code else ("commit", "dirty")',
        '("code",)',
        "test_shards.py::test_shards_without_a_digest_of_their_code_are_of_one_commit",
    ),
    (
        "one_reason_for_all_missing",
        "a shard that is missing without a reason is accepted if another has one",
        "not known.keys() >= set(missing):",
        "not known:",
        "test_shards.py::test_a_shard_that_is_missing_is_in_the_account_of_its_suite",
    ),
)
REPORTS_NIGHTLY_FAN_OUT = of(
    "reports/nightly/fan_out.py",
    (
        "hosts_told_by_processor",
        "machines with one processor and other flags or threads are one host",
        "if len({part.fingerprint for part in manifest.parts}) <= 1:",
        "if len({part.processor for part in manifest.parts}) <= 1:",
        "test_fan_out.py::test_hosts_of_one_processor_and_other_settings_are_several",
    ),
    (
        "reference_is_no_input",
        "parts measured with another megalodon-hf are taken",
        '*([f"{MODULE}megalodon"] if reference == "live" else [])',
        "",
        "test_content.py::test_a_live_reference_is_an_input_by_its_source",
    ),
)
REPORTS_NIGHTLY_RUN = of(
    "reports/nightly/run.py",
    (
        "given_checkpoint_not_probed",
        "a checkpoint given with some cases is not probed",
        "(PROBES_PART,) if options.checkpoint or not options.cases else ()",
        "(PROBES_PART,) if not options.cases else ()",
        "test_nightly.py::test_a_healthy_night_passes_is_stored_and_summarised",
    ),
)
REPORTS_NIGHTLY_SUITES = of(
    "reports/nightly/suites.py",
    (
        "broken_down_after_the_last_is_ran",
        "a suite that broke down in its replay has run",
        "if self.executed == self.planned and not self.reason else",
        "if self.executed == self.planned else",
        "test_nightly.py::test_a_suite_ran_if_it_did_all_it_planned_and_nothing_broke_down",
    ),
)
PARITY_ENGINE_METRICS = of(
    "parity/engine/measure/metrics.py",
    (
        "flips_by_twice_the_bound",
        "the margin that a flip needs is sqrt(2) too wide",
        "math.sqrt(2) * bound * np.linalg.norm(e, axis=-1)",
        "2 * bound * np.linalg.norm(e, axis=-1)",
        "test_compare.py::test_a_flip_counts_where_the_tolerance_cannot_explain_it",
    ),
)
PARITY_ENGINE_CONTRACT = of(
    "parity/engine/measure/contract.py",
    (
        "contract_without_metrics",
        "a gate of another metric stands for the planned one",
        'f"{gate.quantity}\\t{gate.metric}" for gate in gates',
        "gate.quantity for gate in gates",
        "test_contract.py::test_another_gate_does_not_stand_for_a_planned_one",
    ),
)
PARITY_ENGINE_LAYOUTS = of(
    "parity/engine/pairing/layouts.py",
    (
        "layout_back_by_the_same_axes",
        "the inverse layout permutes axes as the layout does",
        "int(axis) for axis in np.argsort(self.axes))",
        "int(axis) for axis in self.axes)",
        "test_layouts.py::test_a_layout_is_found_named_and_inverted",
    ),
)
PARITY_ENGINE_PARAMETER_PAIRS = of(
    "parity/engine/pairing/parameter_pairs.py",
    (
        "gradient_of_the_last_use",
        "of parameters made of one of the original the last use's gradient counts",
        "sums[name] + value if name in sums else value",
        "value",
        "test_matching.py::test_gradients_of_tied_copies_are_summed",
    ),
)
PARITY_ENGINE_FINGERPRINTS = of(
    "parity/engine/pairing/fingerprints.py",
    (
        "minus_zero_is_another_value",
        "an array with -0 for 0 has another fingerprint",
        "(chunk + 0.0).view(np.uint64)",
        "chunk.copy().view(np.uint64)",
        "test_layouts.py::test_minus_zero_is_zero",
    ),
)
PARITY_ENGINE_EVALUATION = of(
    "parity/engine/programs/evaluation.py",
    (
        "turns_of_a_reverse_scan_forwards",
        "marks of a reversed loop are in the order of turns, not of execution",
        'range(length)[:: -1 if p["reverse"] else 1]',
        "range(length)",
        "test_evaluation.py::test_a_mark_is_seen_wherever_it_is_and_changes_no_bit",
    ),
)
PARITY_ENGINE_ROUNDING_RULES = of(
    "parity/engine/programs/rounding_rules.py",
    (
        "cumulative_sum_of_one_term",
        "a cumulative sum rounds as if it had one term",
        'if name.startswith("cum"):',
        'if name == "cumprod":',
        "test_evaluation.py::test_a_running_sum_of_many_terms_responds_more_than_one_of_few",
    ),
)
PARITY_ENGINE_LOCALIZE = of(
    "parity/engine/measure/localize.py",
    (
        "not_comparable_before_failing",
        "a difference starts at what could not be compared although something fails",
        "key=lambda m: (m.verdict is not Verdict.FAIL, m.stage < 0, m.stage)",
        "key=lambda m: (m.stage < 0, m.stage)",
        "test_verdicts.py::test_what_failed_is_named_before_what_could_not_be_compared",
    ),
)
PARITY_PORT_EXACT = of(
    "parity/port/exact.py",
    (
        "one_partner_of_two_results",
        "two results of the original are compared with one of the port",
        "            rest.remove(other)\n",
        "",
        "test_what_was_compared.py::test_whole_numbers_pair_by_name_then_by_shape",
    ),
)
PARITY_PORT_LEDGER = of(
    "parity/port/ledger.py",
    (
        "note_is_a_gate",
        "a row that was no gate counts as compared",
        "if not any(_is_gate(row) for row in found):",
        "if not found:",
        "test_what_was_compared.py::test_agreement_of_nothing_does_not_hold",
    ),
    (
        "derivative_is_a_result",
        "a port whose derivatives alone were compared holds",
        "any(entry.compared and entry.role is Role.OUTPUT for entry in ledger)",
        "any(entry.compared for entry in ledger)",
        "test_what_was_compared.py::test_a_derivative_that_was_compared_is_no_result",
    ),
)
PARITY_PORT_ROUNDING_FLOORS = of(
    "parity/port/rounding_floors.py",
    (
        "unknown_floor_is_zero",
        "a side without a floor of a stage rounds nothing",
        "each.get(name, math.nan) for each in floors",
        "each.get(name, 0.0) for each in floors",
        "test_rounding_floors.py::test_what_one_side_did_not_measure_has_no_floor_on_either",
    ),
)
PARITY_PORT_COMPARE = of(
    "parity/port/compare.py",
    (
        "fresh_parameter_is_lost",
        "a constant that no derivative reaches counts as a parameter the port lacks",
        "if np.any(gradients.get(name, 0)) and _of_the_original(name) not in rounding",
        "if _of_the_original(name) not in rounding",
        "test_port_compare.py::test_without_derivatives_a_fresh_parameter_is_noticed_and_not_called_missing",
    ),
)
PARITY_PORT_SIDE_RUNS = of(
    "parity/port/side_runs.py",
    (
        "integers_may_vary",
        "whole numbers that differ between two runs are not noticed",
        "(self.narrow.stages | self.narrow.exact).items()",
        "self.narrow.stages.items()",
        "test_what_was_compared.py::test_a_side_that_returns_other_whole_numbers_each_time_is_not_deterministic",
    ),
    (
        "left_out_by_its_beginning",
        "a result is left out because its name begins like one that is",
        'name == n or name.startswith((f"{n}.", f"{n}["))',
        "name.startswith(n)",
        "test_what_was_compared.py::test_a_result_is_left_out_with_what_is_below_it_and_not_by_its_beginning",
    ),
)
PARITY_PORT_CONSEQUENCES = of(
    "parity/port/consequences.py",
    (
        "excused_before_a_real_failure",
        "stages before one that really fails are taken for two quantities",
        "        if not _may_be_two(pair, outputs):\n            break\n",
        "        if not _may_be_two(pair, outputs):\n            continue\n",
        "test_consequences.py::test_one_that_changes_what_follows_by_less_than_any_tolerance_of_float32_is_failed",
    ),
)
PARITY_PORT_LOCALISATION = of(
    "parity/port/localisation.py",
    (
        "fed_with_masks_of_the_original",
        "the port is fed the masks of the original as numbers",
        "if pair.port in port.masked or pair.original in original.masked",
        "if pair.port in port.masked",
        "test_tables_and_masks.py::test_a_stage_with_masks_on_either_side_is_not_fed",
    ),
)
PARITY_PORT_REPORT = of(
    "parity/port/report.py",
    (
        "layer_1_is_in_layer_10",
        "a parameter of layers.1 is first used in layers.10",
        ' + r"(?![A-Za-z0-9_])")',
        ")",
        "test_derivative_order.py",
    ),
)
PARITY_EXECUTORS_INPUTS = of(
    "parity/executors/inputs.py",
    (
        "files_without_names",
        "a renamed file is no change of content",
        'f"{relative}\\0{digest_of_file(files[relative])}\\n"',
        'f"{digest_of_file(files[relative])}\\n"',
        "test_item_inputs.py::test_another_content_at_the_same_path_is_another_input",
    ),
    (
        "stamp_of_a_fresh_file_believed",
        "a file changed twice within one step of the clock keeps its digest",
        "if _stamp(path) == before and time.time() - before[3] / 1e9 > _SETTLED:",
        "if _stamp(path) == before:",
        "test_item_inputs.py::test_a_file_is_read_again_only_after_a_change",
    ),
)
PARITY_EXECUTORS_ITEM = of(
    "parity/executors/item.py",
    (
        "changes_during_an_item_unseen",
        "code or inputs that changed while an item ran are not noticed",
        "if name else {}\n        _check_alike(item, expected, place.node)\n",
        "if name else {}\n",
        "test_item_inputs.py::test_an_input_that_changes_while_an_item_runs_makes_no_answer",
    ),
    (
        "environment_not_in_the_digest",
        "the answer of one simulated host is taken for another's",
        "self.needs.threads, sorted(self.needs.environment.items()), self.needs.device",
        "self.needs.threads, self.needs.device",
        "test_item_inputs.py::test_another_work_has_another_digest",
    ),
)
PARITY_EXECUTORS_IDENTITY = of(
    "parity/executors/identity.py",
    (
        "empty_variable_is_a_setting",
        "a variable that is empty tells two processes apart",
        "if value and name.startswith(PREFIXES)",
        "if name.startswith(PREFIXES)",
        "test_item_inputs.py::test_settings_are_the_variables_that_change_numbers",
    ),
    (
        "new_file_is_no_change",
        "a file that was added or deleted during a night is no change",
        "for name in first.keys() | now.keys() if",
        "for name in first.keys() & now.keys() if",
        "test_item_inputs.py::test_code_is_the_packages_with_their_data",
    ),
)
PARITY_EXECUTORS_SWEEP = of(
    "parity/executors/sweep.py",
    (
        "answers_as_they_came",
        "answers are in the order in which they came",
        "return [known[item.name] for item in items]",
        "return list(known.values())",
        "test_executors.py::test_a_sweep_of_which_every_answer_is_needed_names_those_it_has_not",
    ),
)
PARITY_EXECUTORS_LOCAL = of(
    "parity/executors/local.py",
    (
        "memory_of_the_smallest",
        "as many processes as the smallest items leave room for",
        "memory = max(item.needs.memory for item in items)",
        "memory = min(item.needs.memory for item in items)",
        "test_executors.py::test_as_many_processes_as_memory_and_processors_allow",
    ),
)
PARITY_EXECUTORS_PACE = of(
    "parity/executors/pace.py",
    (
        "estimate_below_zero",
        "items that take longer than expected make the estimate smaller",
        "max(takes[n] - ages[n], ages[n] / LATE) for n in takes",
        "takes[n] - ages[n] for n in takes",
        "test_executors.py::test_progress_says_who_is_at_what_what_was_slowest_and_how_long_it_takes",
    ),
)
PARITY_EXECUTORS_CLUSTER = of(
    "parity/executors/cluster.py",
    (
        "one_retry_too_many",
        "an item may kill one worker more on a cluster than here",
        '"max_retries": ATTEMPTS - 1,',
        '"max_retries": ATTEMPTS,',
        "test_executors.py::test_an_item_may_kill_as_many_workers_on_a_cluster_as_here",
    ),
)
REPORTS_VERDICT_SINCE = of(
    "reports/verdict/since.py",
    (
        "held_at_its_bound_fails",
        "a run whose value was exactly at its tolerance counts as one that failed",
        "if share <= 1:",
        "if share < 1:",
        "test_since.py::test_a_gate_fails_since_the_run_after_the_last_in_which_it_held",
    ),
)
REPORTS_VERDICT_PINS = of(
    "reports/verdict/pins.py",
    (
        "bars_in_the_name_of_a_case",
        "a case with bars in its name is torn apart",
        'parts = name.rsplit(" | ", 3)',
        'parts = name.split(" | ", 3)',
        "test_steps.py::test_every_level_that_was_written_is_read",
    ),
)
PARITY_ENGINE_RESEMBLANCE = of(
    "parity/engine/pairing/resemblance.py",
    (
        "nan_on_both_sides_differs",
        "where both arrays hold NaN they count as different",
        "differs = (x != y) & ~((x != x) & (y != y))",
        "differs = x != y",
        "test_matching.py::test_what_is_no_number_on_both_sides_does_not_differ",
    ),
)

MUTANTS = (
    *REPORTS_VERDICT_DECIDE,
    *REPORTS_VERDICT_NOISE,
    *REPORTS_VERDICT_LEVELS,
    *REPORTS_VERDICT_DRIFT,
    *REPORTS_STORE_SHARED,
    *REPORTS_STORE_SENDING,
    *REPORTS_STORE_INDEX,
    *REPORTS_STORE_GATHERED,
    *REPORTS_STORE_EXAMINE,
    *REPORTS_STORE_MANIFEST,
    *REPORTS_STORE_UNSENT,
    *REPORTS_STORE_OBJECTS,
    *REPORTS_REGISTRY_LOOKUP,
    *REPORTS_REGISTRY_RETENTION,
    *REPORTS_REGISTRY_LOOKBACK,
    *REPORTS_REGISTRY_PIN,
    *REPORTS_REGISTRY_OUTCOME,
    *REPORTS_NIGHTLY_PYTEST_SESSION,
    *REPORTS_NIGHTLY_SHARDS,
    *REPORTS_NIGHTLY_FAN_OUT,
    *REPORTS_NIGHTLY_RUN,
    *REPORTS_NIGHTLY_SUITES,
    *PARITY_ENGINE_METRICS,
    *PARITY_ENGINE_CONTRACT,
    *PARITY_ENGINE_LAYOUTS,
    *PARITY_ENGINE_PARAMETER_PAIRS,
    *PARITY_ENGINE_FINGERPRINTS,
    *PARITY_ENGINE_EVALUATION,
    *PARITY_ENGINE_ROUNDING_RULES,
    *PARITY_ENGINE_LOCALIZE,
    *PARITY_PORT_EXACT,
    *PARITY_PORT_LEDGER,
    *PARITY_PORT_ROUNDING_FLOORS,
    *PARITY_PORT_COMPARE,
    *PARITY_PORT_SIDE_RUNS,
    *PARITY_PORT_CONSEQUENCES,
    *PARITY_PORT_LOCALISATION,
    *PARITY_PORT_REPORT,
    *PARITY_EXECUTORS_INPUTS,
    *PARITY_EXECUTORS_ITEM,
    *PARITY_EXECUTORS_IDENTITY,
    *PARITY_EXECUTORS_SWEEP,
    *PARITY_EXECUTORS_LOCAL,
    *PARITY_EXECUTORS_PACE,
    *PARITY_EXECUTORS_CLUSTER,
    *REPORTS_VERDICT_SINCE,
    *REPORTS_VERDICT_PINS,
    *PARITY_ENGINE_RESEMBLANCE,
)
