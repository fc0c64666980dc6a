"""Mutants of the second blind round: written from the source alone, before any test was read."""

from __future__ import annotations

from tools.mutant_list.mutant import of

REPORTS_VERDICT_AGREEMENT = of(
    "reports/verdict/agreement.py",
    (
        "tolerance_equals_itself",
        "a tolerance that changed is compared with itself",
        "(a.value, b.value), (a.tolerance, b.tolerance)",
        "(a.value, b.value), (a.tolerance, a.tolerance)",
        "test_equal_nights.py test_compare_page.py test_verdicts.py",
    ),
    (
        "lost_gate_is_no_difference",
        "a gate that the later run lost is no difference",
        "alone = self.other_work + self.only_before + self.only_now",
        "alone = self.other_work + self.only_now",
        "test_equal_nights.py test_compare_page.py test_verdicts.py",
    ),
)
REPORTS_VERDICT_ANCHORS = of(
    "reports/verdict/anchors.py",
    (
        "night_anchors_itself",
        "a night is its own anchor",
        "and old.manifest.created < run.manifest.created",
        "and old.manifest.created <= run.manifest.created",
        "test_hosts.py test_first_night.py test_evidence.py",
    ),
    (
        "newer_anchor_counts",
        "of two anchors that have a level the newer counts",
        "levels = {**own, **levels}",
        "levels = {**levels, **own}",
        "test_hosts.py",
    ),
)
REPORTS_VERDICT_CHANGE_POINTS = of(
    "reports/verdict/change_points.py",
    (
        "level_by_mean",
        "a mean for a median: one outlier moves a level",
        "float(np.median(part)) for part in",
        "float(np.mean(part)) for part in",
        "test_change_points.py test_speed_history.py",
    ),
)
REPORTS_VERDICT_CHANGES = of(
    "reports/verdict/changes.py",
    (
        "blocked_before_counts_as_fixed",
        "what could not be compared before counts as fixed",
        "if old.verdict is Verdict.FAIL and m.verdict is Verdict.PASS:",
        "if old.verdict is not Verdict.PASS and m.verdict is Verdict.PASS:",
        "test_verdicts.py",
    ),
    (
        "drift_tolerance_of_now",
        "the tolerance of a drift follows what drifted",
        "tolerance=drift.before * drift.limit if grew",
        "tolerance=drift.now * drift.limit if grew",
        "test_first_night.py test_hosts.py",
    ),
)
REPORTS_VERDICT_COMPLETENESS = of(
    "reports/verdict/completeness.py",
    (
        "ports_have_no_contract",
        "runs of ports have no contract",
        "frozenset((RunKind.NIGHTLY, RunKind.SHARD, RunKind.PORT))",
        "frozenset((RunKind.NIGHTLY, RunKind.SHARD))",
        "test_completeness.py test_verdicts.py",
    ),
    (
        "suite_in_the_contract_alone",
        "a suite of the contract that the run does not know is excused",
        "if without or not planned <= known:",
        "if without:",
        "test_completeness.py test_verdicts.py test_port_command.py",
    ),
)
REPORTS_VERDICT_DECIDE = of(
    "reports/verdict/decide.py",
    (
        "selection_of_the_baseline",
        "the selection of the other run decides which suites are missing",
        "if baseline is None or run.manifest.selected:",
        "if baseline is None or baseline.manifest.selected:",
        "test_verdicts.py",
    ),
    (
        "unknown_hosts_are_one",
        "two hosts that nobody knows are one",
        "bool(now(case)) and now(case) == then(case)",
        "now(case) == then(case)",
        "test_verdicts.py test_evidence.py test_fan_out.py",
    ),
    (
        "no_suite_is_whole",
        "a run that names no suite is whole",
        "if not whole and (suites or counts.gates):",
        "if not whole and suites:",
        "test_verdicts.py",
    ),
)
REPORTS_VERDICT_DRIFT = of(
    "reports/verdict/drift.py",
    (
        "floored_in_both_runs_only",
        "a level that rests on tolerances in one run only is compared",
        "and then.floored + level.floored:",
        "and then.floored and level.floored:",
        "test_hosts.py test_first_night.py",
    ),
)
REPORTS_VERDICT_HISTORY = of(
    "reports/verdict/history.py",
    (
        "nan_night_left_out",
        "a night's NaN is left out of its worst share",
        "present = [v for v in values if v is not None]",
        "present = [v for v in values if v is not None and not math.isnan(v)]",
        "test_history.py test_hosts.py",
    ),
)
REPORTS_VERDICT_LEVELS = of(
    "reports/verdict/levels.py",
    (
        "jackknife_by_all_but_one",
        "the jackknife divides by n - 1",
        "(draws - 1) * statistics.pvariance(estimates)",
        "(draws - 1) * statistics.variance(estimates)",
        "test_spreads.py test_hosts.py",
    ),
)
REPORTS_VERDICT_PINS = of(
    "reports/verdict/pins.py",
    (
        "newest_run_is_newest_pin",
        "the newest pin is the one of the newest run",
        "key=lambda pin: (pin.pinned, pin.run), reverse=True",
        "key=lambda pin: (pin.run, pin.pinned), reverse=True",
        "test_pins.py",
    ),
    (
        "damaged_pin_protects_nothing",
        "a damaged pin protects no run",
        "{pin.run} if pin else set(_NAMED_RUN.findall(text))",
        "{pin.run} if pin else set()",
        "test_pins.py test_hosts.py test_store_commands.py",
    ),
)
REPORTS_VERDICT_SEVERAL = of(
    "reports/verdict/several.py",
    (
        "work_compared_with_itself",
        "the work of a cell is compared with its own",
        "identity = m.identity if identity is None else identity",
        "identity = m.identity",
        "test_compare_several.py",
    ),
)
REPORTS_VERDICT_SENTENCES = of(
    "reports/verdict/sentences.py",
    (
        "pin_of_other_work_ends_first_nights",
        "a night whose own pin has no level of its work is no first night",
        "if any(h.same and h.comparable for h in comparisons):",
        "if any(h.same for h in comparisons):",
        "test_first_night.py",
    ),
)
REPORTS_STORE_CLAIMS = of(
    "reports/store/claims.py",
    (
        "retired_name_is_held",
        "a name that was retired is still its writer's",
        "return token in inside and RETIRED not in inside",
        "return token in inside",
        "test_claims.py test_lost_replies.py test_shared.py",
    ),
)
REPORTS_STORE_EXAMINE = of(
    "reports/store/examine.py",
    (
        "infinite_tolerance_in_lists",
        "an infinite tolerance holds in lists",
        "asked & np.isfinite(value) & ~np.isfinite(tolerance)",
        "asked & np.isfinite(value) & np.isnan(tolerance)",
        "test_index.py test_store.py",
    ),
)
REPORTS_STORE_FAILURES = of(
    "reports/store/failures.py",
    (
        "deleted_failures_are_none",
        "a deleted file of failures is none that was stored",
        "if not os.path.lexists(path) and path.name not in (checksums or {}):",
        "if not os.path.lexists(path):",
        "test_store.py test_page_data.py",
    ),
)
REPORTS_STORE_MANIFEST = of(
    "reports/store/manifest.py",
    (
        "run_without_suites_is_whole",
        "a run without suites is whole",
        "and bool(self.suites)\n            and all(suite.whole",
        "and all(suite.whole",
        "test_store.py test_seal.py test_verdicts.py test_evidence.py test_hosts.py",
    ),
    (
        "no_files_named_no_check",
        "a run whose document names no files is not checked",
        "else self.files or {}",
        "else self.files",
        "test_store.py test_hostile_folders.py",
    ),
    (
        "subject_of_fewer_ports",
        "a run about two ports shares no subject with one about one of them",
        "alike = self.subject == other.subject or bool(self.subject & other.subject)",
        "alike = self.subject <= other.subject",
        "test_store.py test_seal.py test_verdicts.py test_evidence.py test_hosts.py",
    ),
)
REPORTS_STORE_OBJECTS = of(
    "reports/store/objects.py",
    (
        "foreign_object_is_ours",
        "an object of somebody else is the one that was to be written",
        "return there == content",
        "return True",
        "test_claims.py test_lost_replies.py test_shared.py",
    ),
)
REPORTS_STORE_SHARED = of(
    "reports/store/shared.py",
    (
        "slow_writer_with_an_old_claim",
        "a slow writer whose claim is old is taken for a dead one",
        "newest = max((time for time in times if time is not None), default=now)",
        "newest = min((time for time in times if time is not None), default=now)",
        "test_claims.py test_shared.py test_lost_replies.py",
    ),
    (
        "verdict_without_a_page_is_complete",
        "a run with a verdict and without its page gets no page",
        "young and not all((folder / file).exists() for file in LATE)",
        "young and not any((folder / file).exists() for file in LATE)",
        "test_shared.py",
    ),
)
REPORTS_STORE_TIMINGS = of(
    "reports/store/timings.py",
    (
        "unmeasured_misses_its_goal",
        "what was not timed missed its goal",
        "if math.isnan(self.value) or math.isnan(self.goal):",
        "if math.isnan(self.goal):",
        "test_bench_sides.py test_speed_history.py test_bench.py",
    ),
)
REPORTS_REGISTRY_GATE_CHANGES = of(
    "reports/registry/gate_changes.py",
    (
        "dropped_across_devices",
        "gates that failed on another device are dropped by a run here",
        "stream = manifest.subject, manifest.environment.device.kind",
        "stream = manifest.subject",
        "test_gate_changes.py test_runs_page.py",
    ),
    (
        "unknown_works_are_one",
        "all runs of unknown work measured the same",
        'return line.work or f"run {line.name}"',
        'return line.work or "unknown"',
        "test_gate_changes.py test_runs_page.py",
    ),
)
REPORTS_REGISTRY_LOOKBACK = of(
    "reports/registry/lookback.py",
    (
        "kind_of_the_oldest",
        "without nights a question is about the oldest kind of run",
        "not kinds else kinds[-1]",
        "not kinds else kinds[0]",
        "test_store_commands.py::test_a_question_that_names_no_kind_is_about_nights_or_else_the_newest_runs",
    ),
    (
        "latest_are_the_oldest",
        "gates of the oldest runs are listed as the latest",
        "for created in dates[-LATEST:]",
        "for created in dates[:LATEST]",
        "test_store_commands.py::test_a_gate_is_listed_while_one_of_the_newest_runs_has_it",
    ),
)
REPORTS_REGISTRY_LOOKUP = of(
    "reports/registry/lookup.py",
    (
        "regression_withheld",
        "a regression is withheld where a newer run is damaged",
        "if not found.newer or decision.exit_code is not ExitCode.PASS:",
        "if not found.newer:",
        "test_attacks.py",
    ),
    (
        "age_limit_may_be_nan",
        "an age limit that is no number is met",
        "if not -AHEAD <= age <= hours:",
        "if age < -AHEAD or age > hours:",
        "test_attacks.py test_store_commands.py test_evidence.py test_gpu_workflow.py",
    ),
    (
        "old_schema_anchors_nothing",
        "a night from before contracts anchors no level",
        "decide(old, None, {}, pinned.pins, old_schema_may_pass=True)",
        "decide(old, None, {}, pinned.pins)",
        "test_hosts.py",
    ),
)
REPORTS_REGISTRY_PIN = of(
    "reports/registry/pin.py",
    (
        "pinned_with_changes_of_its_night",
        "the tree of now stands for that of the run",
        '"was made from a tree with uncommitted changes": manifest.dirty',
        '"was made from a tree with uncommitted changes": dirty',
        "test_pins.py test_store_commands.py",
    ),
)
REPORTS_REGISTRY_RETENTION = of(
    "reports/registry/retention.py",
    (
        "kept_across_devices",
        "runs of one device push those of another out",
        "groups.setdefault((run.kind, run.manifest.subject, device), [])",
        "groups.setdefault((run.kind, run.manifest.subject), [])",
        "test_evidence.py test_store_commands.py test_hosts.py test_shared.py",
    ),
    (
        "deleted_file_by_file",
        "an interrupted deletion leaves a run without some of its files",
        "        os.rename(folder, aside)\n        shutil.rmtree(aside)",
        "        shutil.rmtree(folder)",
        "test_store.py",
    ),
)
REPORTS_REGISTRY_RUNS_PAGE = of(
    "reports/registry/runs_page.py",
    (
        "undated_damage_is_old",
        "a damaged folder without a date is the oldest",
        'key=lambda e: (e.created or "\\uffff", e.name)',
        "key=lambda e: (e.created, e.name)",
        "test_runs_page.py",
    ),
)
REPORTS_REGISTRY_SEVERAL = of(
    "reports/registry/several.py",
    (
        "blocked_gate_held_in_the_table",
        "what could not be compared held, in the table of several runs",
        "cells[i][0] += m.verdict is Verdict.PASS",
        "cells[i][0] += m.verdict is not Verdict.FAIL",
        "test_compare_several.py",
    ),
)
REPORTS_REGISTRY_SIDE_BY_SIDE = of(
    "reports/registry/side_by_side.py",
    (
        "equal_runs_changed",
        "two equal runs of one failure changed",
        "changed = bool(decision.changes) and not found.equal",
        "changed = bool(decision.changes) or not found.equal",
        "test_compare_page.py test_equal_nights.py",
    ),
)
REPORTS_NIGHTLY_SUITES = of(
    "reports/nightly/suites.py",
    (
        "unrepeated_value_repeats",
        "a value that the second run did not measure repeats",
        "second = values.get(m.key, math.inf)",
        "second = values.get(m.key, m.value)",
        "test_suites.py test_nightly.py test_red_night.py",
    ),
    (
        "known_differences_repeat_themselves",
        "known differences are repeated by themselves",
        "again = list(suite.timed(iter(measure_known_differences(reference, device_kind()))))",
        "again = suite.measurements",
        "test_suites.py test_nightly.py test_red_night.py",
    ),
    (
        "contract_of_the_same_run",
        "the contract of a port is what the same run found",
        "suite.contract += again.contract",
        "suite.contract += once.contract",
        "test_suites.py",
    ),
    (
        "one_more_explained",
        "one case too many is explained",
        "if len(suite.explanations) >= EXPLAINED:",
        "if len(suite.explanations) > EXPLAINED:",
        "test_suites.py test_nightly.py test_red_night.py",
    ),
)
REPORTS_NIGHTLY_SHARDS = of(
    "reports/nightly/shards.py",
    (
        "ran_in_one_shard",
        "a suite ran if it ran in one shard",
        'status="ran" if all(part.status == "ran" for part in parts)',
        'status="ran" if any(part.status == "ran" for part in parts)',
        "test_shards.py",
    ),
    (
        "shards_of_two_faults",
        "a shard with a planted fault is merged with others",
        '(*code, "plan", "selected", "fault", "checkpoint")',
        '(*code, "plan", "selected", "checkpoint")',
        "test_shards.py test_workflows.py",
    ),
    (
        "machines_told_by_device",
        "shards of hosts of one name are of one machine",
        "if all(environment.machine == all_of[0].machine for",
        "if all(environment.device == all_of[0].device for",
        "test_shards.py test_fan_out.py",
    ),
    (
        "any_reason_for_all_missing",
        "a reason for one missing shard excuses all",
        "not known.keys() >= set(missing)",
        "not known.keys() & set(missing)",
        "test_shards.py",
    ),
)
REPORTS_NIGHTLY_FAN_OUT = of(
    "reports/nightly/fan_out.py",
    (
        "several_hosts_with_one_identity",
        "a night of several hosts has the identity of one of them",
        "return replace(environment, device=device, host={}, threads=",
        "return replace(environment, device=device, threads=",
        "test_fan_out.py test_content.py",
    ),
    (
        "another_run_of_the_second",
        "a run of the same second is the one that was merged",
        "if _same_night(read_manifest(place.parent), merged.manifest):",
        "if place.parent.name == merged.id:",
        "test_fan_out.py test_content.py",
    ),
)
REPORTS_NIGHTLY_EXPECTED = of(
    "reports/nightly/expected.py",
    (
        "longest_part_takes_no_time",
        "the longest part alone takes no time",
        "seconds = makespan(list(expected.values()), workers)",
        "seconds = sum(expected.values()) / max(workers, 1)",
        "test_expected.py",
    ),
)
PARITY_ENGINE_BOUNDS = of(
    "parity/engine/measure/bounds.py",
    (
        "bound_is_a_sum",
        "a bound is the sum of its parts, not the larger",
        "max(row.absolute, row.noise_factor * floor)",
        "row.absolute + row.noise_factor * floor",
        "test_compare.py test_rounding_floors.py",
    ),
)
PARITY_ENGINE_COMPARE = of(
    "parity/engine/measure/compare.py",
    (
        "missing_gradient_left_out",
        "a gradient that is missing is left out of the ratio of all",
        "float(np.sqrt(np.mean(np.square(e))))",
        "float(np.sqrt(np.nanmean(np.square(e))))",
        "test_compare.py test_rounding_floors.py test_cancelled_derivatives.py",
    ),
    (
        "flip_margin_scaled_back",
        "the margin of a flip is scaled the wrong way",
        "bound *= self.scales[name] / norm",
        "bound *= norm / self.scales[name]",
        "test_compare.py test_rounding_floors.py test_cancelled_derivatives.py",
    ),
)
PARITY_ENGINE_METRICS = of(
    "parity/engine/measure/metrics.py",
    (
        "flips_by_the_bound_alone",
        "a margin that rounding explains is clear",
        "math.sqrt(2) * bound * np.linalg.norm(e, axis=-1)",
        "bound * np.linalg.norm(e, axis=-1)",
        "test_compare.py test_tables_and_masks.py",
    ),
    (
        "shared_overflow_is_a_mask",
        "an overflow of both sides is a mask",
        "same = np.isinf(e) & (a == e) & (truth == e)",
        "same = np.isinf(e) & (a == e)",
        "test_nan_under_rounding.py test_compare.py",
    ),
)
PARITY_ENGINE_CLOSENESS = of(
    "parity/engine/pairing/closeness.py",
    (
        "masks_in_the_scale",
        "masks drown the numbers beside them",
        "scale = _norm(e[np.abs(e) < MASKED])",
        "scale = _norm(e)",
        "test_alignment.py",
    ),
)
PARITY_ENGINE_WHERE = of(
    "parity/engine/measure/where.py",
    (
        "right_elements_are_culprits",
        "without room elements that are right break the tolerance",
        "wrong[order[np.cumsum(squares[order]) > room]] = True",
        "wrong[order[np.cumsum(squares[order]) >= room]] = True",
        "test_where.py test_deviation.py test_every_element.py",
    ),
)
PARITY_ENGINE_IRREGULARITIES = of(
    "parity/engine/pairing/irregularities.py",
    (
        "rule_needs_four",
        "three pairs make no rule",
        "if len(members) >= ENOUGH and count >= MAJORITY",
        "if len(members) > ENOUGH and count >= MAJORITY",
        "test_matching.py",
    ),
)
PARITY_ENGINE_ALIGNMENT = of(
    "parity/engine/pairing/alignment.py",
    (
        "order_among_unequal_counts",
        "stages are paired by their place where one side has more of them",
        "if len(rows) == len(columns) and all(free[c] and diverged[c] for c in cells):",
        "if all(free[c] and diverged[c] for c in cells):",
        "test_alignment.py test_returned.py",
    ),
)
PARITY_ENGINE_ROUNDING_NOISE = of(
    "parity/engine/measure/rounding_noise.py",
    (
        "sum_without_its_terms",
        "the rounding of the terms themselves is left out",
        "return UNIT_ROUNDOFF * math.sqrt(1 + terms / 11)",
        "return UNIT_ROUNDOFF * math.sqrt(terms / 11)",
        "test_compare.py test_pooling.py",
    ),
)
PARITY_ENGINE_EVALUATION = of(
    "parity/engine/programs/evaluation.py",
    (
        "turns_round_alike",
        "every turn of a loop is rounded by the same signs",
        "outputs = self.at(turn)._call(",
        "outputs = self._call(",
        "test_evaluation.py",
    ),
)
PARITY_PORT_CONSEQUENCES = of(
    "parity/port/consequences.py",
    (
        "bug_behind_is_a_quantity",
        "a bug behind another one makes two quantities of the first",
        "any(s.broken and s.name not in failing for s in behind)",
        "any(s.broken for s in behind)",
        "test_consequences.py",
    ),
)
PARITY_PORT_LEDGER = of(
    "parity/port/ledger.py",
    (
        "missing_counts_as_compared",
        "a result that is missing was compared",
        "row.verdict in (Verdict.PASS, Verdict.FAIL) and math.isfinite(row.tolerance)",
        "row.verdict in (Verdict.PASS, Verdict.FAIL)",
        "test_what_was_compared.py",
    ),
    (
        "self_comparison_in_the_ledger",
        "a side that was compared with itself was compared with the port",
        'if row.edge in BETWEEN and row.metric in ("rel_l2", "unequal"):',
        'if row.metric in ("rel_l2", "unequal"):',
        "test_what_was_compared.py",
    ),
)
PARITY_PORT_LOCALISATION = of(
    "parity/port/localisation.py",
    (
        "operation_as_wrong_as_its_stage",
        "an operation as wrong as its stage is known to the original",
        "same = min(ROOM * stage.tolerance, stage.forced / ROOM)",
        "same = max(ROOM * stage.tolerance, stage.forced / ROOM)",
        "test_tables_and_masks.py test_port_compare.py",
    ),
    (
        "fed_with_masks_of_one_side",
        "a stage with masks on one side is fed to the port",
        "if pair.port in port.masked or pair.original in original.masked",
        "if pair.port in port.masked and pair.original in original.masked",
        "test_tables_and_masks.py test_port_compare.py",
    ),
)
PARITY_PORT_NARROW = of(
    "parity/port/narrow.py",
    (
        "narrow_nan_without_floors",
        "a NaN in bfloat16 fails nothing where rounding was not measured",
        "if floors or math.isnan(stage.port):",
        "if floors:",
        "test_nan_under_rounding.py",
    ),
)
PARITY_PORT_ROUNDING_FLOORS = of(
    "parity/port/rounding_floors.py",
    (
        "float64_floor_of_float32",
        "float64 has the floor of float32",
        "together(*tables, *map(narrowed, sides))",
        "together(*tables, *sides)",
        "test_rounding_floors.py test_tables_and_masks.py test_port_compare.py",
    ),
    (
        "no_floor_has_the_tables_bound",
        "a stage without a floor has the bound of the table",
        "return bound if not math.isnan(floor) else math.nan",
        "return bound",
        "test_rounding_floors.py test_tables_and_masks.py test_port_compare.py",
    ),
)
PARITY_PORT_COMPARE = of(
    "parity/port/compare.py",
    (
        "work_without_inputs",
        "runs of other inputs are the same work",
        "for name, array in (*side.parameters().items(), *side.inputs().items()):",
        "for name, array in side.parameters().items():",
        "test_what_was_compared.py",
    ),
)
PARITY_PORT_REPORT = of(
    "parity/port/report.py",
    (
        "no_share_is_nearest",
        "what has no share of a tolerance is the nearest, not the furthest",
        "return math.inf if math.isnan(fraction) else fraction",
        "return 0.0 if math.isnan(fraction) else fraction",
        "test_derivative_order.py test_port_document.py",
    ),
)
PARITY_EXECUTORS_IDENTITY = of(
    "parity/executors/identity.py",
    (
        "variable_of_one_process",
        "a variable that one process has alone is no difference",
        "for name in sorted(mine.keys() | theirs.keys()):",
        "for name in sorted(mine.keys() & theirs.keys()):",
        "test_item_inputs.py test_executors.py",
    ),
    (
        "bytecode_by_time_of_change",
        "bytecode is trusted by a time that can be set back",
        "if stored.stat().st_mtime_ns >= source.stat().st_ctime_ns:",
        "if stored.stat().st_mtime_ns >= source.stat().st_mtime_ns:",
        "test_attacks.py test_item_inputs.py",
    ),
)
PARITY_EXECUTORS_ITEM = of(
    "parity/executors/item.py",
    (
        "digest_without_gpu",
        "an answer of a processor is one of a GPU",
        "self.arguments, needs, bool(self.needs.gpus), source)",
        "self.arguments, needs, source)",
        "test_item_inputs.py test_executors.py",
    ),
)
PARITY_EXECUTORS_LOCAL = of(
    "parity/executors/local.py",
    (
        "accelerators_overlap",
        "two processes share an accelerator",
        "range(slot * width, (slot + 1) * width)",
        "range(slot, slot + width)",
        "test_executors.py",
    ),
)
PARITY_EXECUTORS_SWEEP = of(
    "parity/executors/sweep.py",
    (
        "failure_is_kept",
        "a failure is stored and never tried again",
        "if answers and answer.state is State.DONE:",
        "if answers:",
        "test_executors.py",
    ),
)
PARITY_EXECUTORS_CLUSTER = of(
    "parity/executors/cluster.py",
    (
        "just_enough_is_too_little",
        "a node that has just enough has too little",
        "node.get(name, 0.0) >= amount",
        "node.get(name, 0.0) > amount",
        "test_executors.py test_ray_executor.py",
    ),
)
PARITY_EXECUTORS_PACE = of(
    "parity/executors/pace.py",
    (
        "pace_upside_down",
        "a slow machine is expected to be fast",
        "        return taken / wanted\n",
        "        return wanted / taken\n",
        "test_executors.py",
    ),
)
MEGALODON_JAX_LAYERS_TIMESTEP_NORM = of(
    "megalodon_jax/layers/timestep_norm.py",
    (
        "origin_of_a_fresh_stream",
        "a fresh stream is counted from 0 and loses digits to an offset",
        "return jnp.where(state.count[:, None] > 0, state.mean",
        "return jnp.where(state.count[:, None] >= 0, state.mean",
        "test_norms.py",
    ),
    (
        "single_tokens_rebuild_variance",
        "a stream of single tokens rounds its variance once per call",
        "    if L == 1:\n",
        "    if L == 0:\n",
        "test_norms.py",
    ),
)
MEGALODON_JAX_LAYERS_NORMS = of(
    "megalodon_jax/layers/norms.py",
    (
        "layer_norm_default_eps",
        "the eps of LayerNorm is its default",
        "jax.lax.rsqrt(var + self.eps)",
        "jax.lax.rsqrt(var + 1e-5)",
        "test_norms.py test_layer_suite.py",
    ),
)
MEGALODON_JAX_LAYERS_COMPLEX_EMA = of(
    "megalodon_jax/layers/complex_ema.py",
    (
        "ema_silent_behind_text",
        "the filter is silent at padding behind text",
        "y = jnp.where(jnp.cumsum(mask, axis=1)[:, None, :] > 0, y, 0.0)",
        "y = jnp.where(mask[:, None, :], y, 0.0)",
        "test_complex_ema.py",
    ),
)
MEGALODON_JAX_CHECKPOINT = of(
    "megalodon_jax/checkpoint.py",
    (
        "tensors_by_shape_alone",
        "tensors that were edited are those that were saved",
        "f\"{row['dtype']} {tuple(row['shape'])} sha256 {row['sha256'][:16]}\"",
        "f\"{row['dtype']} {tuple(row['shape'])}\"",
        "test_checkpoint.py",
    ),
)
STABILITY_STORAGE_SURVIVAL = of(
    "stability/storage/survival.py",
    (
        "gap_below_the_smallest_normal",
        "below the smallest normal number the gap is half of what it is",
        "(mantissa == 0.5) & (exponent - 1 > fmt.min_exponent)",
        "(mantissa == 0.5) & (exponent - 1 >= fmt.min_exponent)",
        "test_survival.py test_shares.py",
    ),
)
STABILITY_STORAGE_SCHEDULE = of(
    "stability/storage/schedule.py",
    (
        "warmup_lengthens_the_run",
        "a rate with warmup does not reach its end",
        "(step - self.warmup) / (self.steps - self.warmup)",
        "(step - self.warmup) / self.steps",
        "test_whole_run.py",
    ),
)
STABILITY_RECOVERY_GUARD = of(
    "stability/recovery/guard.py",
    (
        "clipped_norm_enters_the_window",
        "a norm that was clipped raises its own limit",
        "norms=_pushed(state.norms, report.norm, report.verdict == Verdict.ACCEPTED)",
        "norms=_pushed(state.norms, report.norm, keep)",
        "test_guard.py",
    ),
    (
        "warmup_of_one_more",
        "one value more before anything is a spike",
        "jnp.where(window.seen >= config.warmup, spike, jnp.inf)",
        "jnp.where(window.seen > config.warmup, spike, jnp.inf)",
        "test_guard.py",
    ),
)
STABILITY_ACTIVATIONS_ATTENTION = of(
    "stability/activations/attention.py",
    (
        "one_key_is_a_choice",
        "queries with one key count as ones that have a choice",
        "several = keys >= 2",
        "several = keys >= 1",
        "test_activations.py",
    ),
)
STABILITY_STORAGE_REMEDIES = of(
    "stability/storage/remedies.py",
    (
        "diverged_has_no_place",
        "a remedy that diverges has no place in the order",
        "return math.inf if math.isnan(miss) else miss",
        "return miss",
        "test_shares.py test_simulate.py",
    ),
)
STABILITY_CORE_FINDINGS = of(
    "stability/core/findings.py",
    (
        "nan_within_its_threshold",
        "a NaN is within its threshold",
        "if value >= threshold if least else value <= threshold:",
        "if not (value < threshold if least else value > threshold):",
        "test_findings.py test_survival.py",
    ),
)
STABILITY_STORAGE_FROZEN_WATCH = of(
    "stability/storage/frozen_watch.py",
    (
        "still_without_gradients",
        "steps without a gradient count as standing still",
        "still[name] = jnp.where(last[name] == before, count, 0)",
        "still[name] = jnp.where(last[name] == before, watch.still[name] + 1, 0)",
        "test_frozen_watch.py",
    ),
)
REPORTS_PAGE_SECTIONS_PORTS = of(
    "reports/page/sections/ports.py",
    (
        "report_of_a_port_ignored",
        "a port whose report says that it does not hold is shown as holding",
        'return bool(document["holds"]) and state_of(_gates(document, run)) == "pass"',
        'return state_of(_gates(document, run)) == "pass"',
        "test_port_page.py test_not_measured.py",
    ),
)
REPORTS_PAGE_SECTIONS_TRENDS = of(
    "reports/page/sections/trends.py",
    (
        "trend_by_the_last_night",
        "a gate is compared with the night before alone",
        "usual = median(past)",
        "usual = past[-1]",
        "test_page_data.py test_page.py",
    ),
)
REPORTS_PAGE_SECTIONS_HEAT = of(
    "reports/page/sections/heat.py",
    (
        "stage_by_its_best_gate",
        "a stage is drawn by the best of its gates",
        "if m.quantity not in worst or rank_of(m) > rank_of(worst[m.quantity]):",
        "if m.quantity not in worst or rank_of(m) < rank_of(worst[m.quantity]):",
        "test_page_data.py test_page.py",
    ),
)
REPORTS_PAGE_SECTIONS_MARKS = of(
    "reports/page/sections/marks.py",
    (
        "blocked_over_failed",
        "a section with a failure is marked as not compared",
        'dict.fromkeys(blocked, "blocked") | dict.fromkeys(red, "fail")',
        'dict.fromkeys(red, "fail") | dict.fromkeys(blocked, "blocked")',
        "test_page_data.py test_page.py test_not_measured.py",
    ),
)
REPORTS_PAGE_SECTIONS_TABLES = of(
    "reports/page/sections/tables.py",
    (
        "gates_need_a_tolerance",
        "what has no tolerance and could not be compared is no gate of the page",
        'data["verdict"] != Verdict.INFO',
        'data["tolerance"].notna()',
        "test_page_data.py test_not_measured.py test_page.py",
    ),
)
REPORTS_PAGE_ALL_RUNS = of(
    "reports/page/all_runs.py",
    (
        "green_over_nothing",
        "a green word over no gate is shown as green",
        "if entry.verdict in _GREEN and (entry.broken or not entry.gates):",
        "if entry.verdict in _GREEN and entry.broken:",
        "test_runs_page.py",
    ),
)
REPORTS_PAGE_SIDE_BY_SIDE = of(
    "reports/page/side_by_side.py",
    (
        "blocked_held_side_by_side",
        "what could not be compared held, on the page of two runs",
        "held = sum(m.verdict is Verdict.PASS for m in gates)\n    severities",
        "held = sum(m.verdict is not Verdict.FAIL for m in gates)\n    severities",
        "test_compare_several.py test_compare_page.py",
    ),
)
REPORTS_EXPORTS_JUNIT = of(
    "reports/exports/junit.py",
    (
        "half_a_plan_in_junit",
        "a suite that ran half of its plan is no error in JUnit",
        "        if not s.whole\n",
        '        if s.status != "ran"\n',
        "test_export_verdict.py test_export_command.py",
    ),
)
REPORTS_EXPORTS_LEVELS = of(
    "reports/exports/levels.py",
    (
        "failed_below_its_tolerance",
        "a gate that failed with a value below its tolerance is drawn as near it",
        "if not measured or (m.verdict is not Verdict.PASS and m.fraction <= 1.0):",
        "if not measured:",
        "test_export_verdict.py test_export_trackers.py",
    ),
)
REPORTS_EXPORTS_STEPS = of(
    "reports/exports/steps.py",
    (
        "blocked_held_in_a_tracker",
        "what could not be compared held, in a tracker",
        "for m in gates if m.verdict is Verdict.PASS)",
        "for m in gates if m.verdict is not Verdict.FAIL)",
        "test_export_verdict.py test_export_trackers.py",
    ),
)
MUTANTS = (
    *REPORTS_VERDICT_AGREEMENT,
    *REPORTS_VERDICT_ANCHORS,
    *REPORTS_VERDICT_CHANGE_POINTS,
    *REPORTS_VERDICT_CHANGES,
    *REPORTS_VERDICT_COMPLETENESS,
    *REPORTS_VERDICT_DECIDE,
    *REPORTS_VERDICT_DRIFT,
    *REPORTS_VERDICT_HISTORY,
    *REPORTS_VERDICT_LEVELS,
    *REPORTS_VERDICT_PINS,
    *REPORTS_VERDICT_SEVERAL,
    *REPORTS_VERDICT_SENTENCES,
    *REPORTS_STORE_CLAIMS,
    *REPORTS_STORE_EXAMINE,
    *REPORTS_STORE_FAILURES,
    *REPORTS_STORE_MANIFEST,
    *REPORTS_STORE_OBJECTS,
    *REPORTS_STORE_SHARED,
    *REPORTS_STORE_TIMINGS,
    *REPORTS_REGISTRY_GATE_CHANGES,
    *REPORTS_REGISTRY_LOOKBACK,
    *REPORTS_REGISTRY_LOOKUP,
    *REPORTS_REGISTRY_PIN,
    *REPORTS_REGISTRY_RETENTION,
    *REPORTS_REGISTRY_RUNS_PAGE,
    *REPORTS_REGISTRY_SEVERAL,
    *REPORTS_REGISTRY_SIDE_BY_SIDE,
    *REPORTS_NIGHTLY_SUITES,
    *REPORTS_NIGHTLY_SHARDS,
    *REPORTS_NIGHTLY_FAN_OUT,
    *REPORTS_NIGHTLY_EXPECTED,
    *PARITY_ENGINE_BOUNDS,
    *PARITY_ENGINE_COMPARE,
    *PARITY_ENGINE_METRICS,
    *PARITY_ENGINE_CLOSENESS,
    *PARITY_ENGINE_WHERE,
    *PARITY_ENGINE_IRREGULARITIES,
    *PARITY_ENGINE_ALIGNMENT,
    *PARITY_ENGINE_ROUNDING_NOISE,
    *PARITY_ENGINE_EVALUATION,
    *PARITY_PORT_CONSEQUENCES,
    *PARITY_PORT_LEDGER,
    *PARITY_PORT_LOCALISATION,
    *PARITY_PORT_NARROW,
    *PARITY_PORT_ROUNDING_FLOORS,
    *PARITY_PORT_COMPARE,
    *PARITY_PORT_REPORT,
    *PARITY_EXECUTORS_IDENTITY,
    *PARITY_EXECUTORS_ITEM,
    *PARITY_EXECUTORS_LOCAL,
    *PARITY_EXECUTORS_SWEEP,
    *PARITY_EXECUTORS_CLUSTER,
    *PARITY_EXECUTORS_PACE,
    *MEGALODON_JAX_LAYERS_TIMESTEP_NORM,
    *MEGALODON_JAX_LAYERS_NORMS,
    *MEGALODON_JAX_LAYERS_COMPLEX_EMA,
    *MEGALODON_JAX_CHECKPOINT,
    *STABILITY_STORAGE_SURVIVAL,
    *STABILITY_STORAGE_SCHEDULE,
    *STABILITY_RECOVERY_GUARD,
    *STABILITY_ACTIVATIONS_ATTENTION,
    *STABILITY_STORAGE_REMEDIES,
    *STABILITY_CORE_FINDINGS,
    *STABILITY_STORAGE_FROZEN_WATCH,
    *REPORTS_PAGE_SECTIONS_PORTS,
    *REPORTS_PAGE_SECTIONS_TRENDS,
    *REPORTS_PAGE_SECTIONS_HEAT,
    *REPORTS_PAGE_SECTIONS_MARKS,
    *REPORTS_PAGE_SECTIONS_TABLES,
    *REPORTS_PAGE_ALL_RUNS,
    *REPORTS_PAGE_SIDE_BY_SIDE,
    *REPORTS_EXPORTS_JUNIT,
    *REPORTS_EXPORTS_LEVELS,
    *REPORTS_EXPORTS_STEPS,
)
