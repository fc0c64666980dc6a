"""Mutants of `reports`: one for each module with logic, and two for some modules of `verdict`."""

from __future__ import annotations

from tools.mutant_list.mutant import of

MUTANTS = (
    *of(
        "reports/nightly/accounts.py",
        (
            "account_without_the_worst",
            "the account of a port has no worst element",
            "place.worst[0] if place.worst else None",
            "None",
            "test_red_night.py::test_a_port_of_the_night_has_its_account_in_the_same_form",
        ),
    ),
    *of(
        "reports/nightly/expected.py",
        (
            "longest_part_takes_no_time",
            "the longest part alone takes no time",
            "seconds = makespan(list(expected.values()), workers)",
            "seconds = sum(expected.values()) / max(workers, 1)",
            "test_expected.py",
        ),
    ),
    *of(
        "reports/nightly/fan_out.py",
        (
            "hosts_told_by_processor",
            "machines with one processor and other flags or threads are one host",
            "if len({part.fingerprint for part in manifest.parts}) <= 1:",
            "if len({part.processor for part in manifest.parts}) <= 1:",
            "test_fan_out.py::test_hosts_of_one_processor_and_other_settings_are_several",
        ),
    ),
    *of(
        "reports/nightly/pytest_session.py",
        (
            "order_of_workers_names_cases",
            "which test keeps a case's name depends on which worker answers first",
            "sorted(records, key=lambda record: record[0])",
            "records",
            "test_pytest_plugin.py::test_a_key_that_two_tests_measure_is_kept_from_both",
        ),
    ),
    *of(
        "reports/nightly/run.py",
        (
            "given_checkpoint_not_probed",
            "a checkpoint given with some cases is not probed",
            "(PROBES_PART,) if options.checkpoint or not options.cases else ()",
            "(PROBES_PART,) if not options.cases else ()",
            "test_nightly.py::test_a_healthy_night_passes_is_stored_and_summarised",
        ),
    ),
    *of(
        "reports/nightly/shards.py",
        (
            "shards_of_other_commits",
            "shards without a digest of their code are merged across commits",
            '("code",) if one.manifest.code and other.manifest.code else ("commit", "dirty")',
            '("code",)',
            "test_shards.py::test_shards_without_a_digest_of_their_code_are_of_one_commit",
        ),
    ),
    *of(
        "reports/suite_run.py",
        (
            "broken_down_after_the_last_is_ran",
            "a suite that broke down in its replay has run",
            "if self.executed == self.planned and not self.reason else",
            "if self.executed == self.planned else",
            "test_nightly.py::test_a_suite_ran_if_it_did_all_it_planned_and_nothing_broke_down",
        ),
    ),
    *of(
        "reports/provenance/gpu.py",
        (
            "flags_of_a_gpu_on_a_processor",
            "a processor gets the flags of a GPU where the packages of one are installed",
            'usable = accelerators() and any(name.startswith("jax-cuda") for name in libraries())',
            'usable = any(name.startswith("jax-cuda") for name in libraries())',
            "test_gpu_identity.py",
        ),
    ),
    *of(
        "reports/provenance/host.py",
        (
            "half_known_processor",
            "a processor of which one field is unknown equals itself",
            "if any(parts[name] == UNKNOWN for name in needed",
            "if all(parts[name] == UNKNOWN for name in needed",
            "test_hosts.py",
        ),
    ),
    *of(
        "reports/registry/gate_changes.py",
        (
            "dropped_across_devices",
            "gates that failed on another device are dropped by a run here",
            "stream = manifest.subject, manifest.environment.device.kind",
            "stream = manifest.subject",
            "test_gate_changes.py test_runs_page.py",
        ),
    ),
    *of(
        "reports/registry/lookback.py",
        (
            "latest_of_all_subjects_together",
            "the newest runs of one subject hide those of another",
            "by_subject.setdefault(manifest.subject, [])",
            "by_subject.setdefault(frozenset(), [])",
            "test_attacks.py::test_gates_of_every_subject_are_listed_whoever_ran_last",
        ),
    ),
    *of(
        "reports/registry/lookup.py",
        (
            "damaged_run_of_the_same_second",
            "a damaged run made in the same second as the newest is passed over",
            "manifest.created >= created and not copied",
            "manifest.created > created and not copied",
            "test_attacks.py::test_another_run_of_the_same_id_is_no_copy",
        ),
    ),
    *of(
        "reports/registry/outcome.py",
        (
            "judged_by_what_was_there_before",
            "runs that others stored during the night are no part of its history",
            "        refresh(folder.parent)\n",
            "",
            "test_shared.py::test_a_run_is_judged_by_what_others_stored_while_it_was_measured",
        ),
    ),
    *of(
        "reports/registry/pin.py",
        (
            "levels_that_fell_come_last",
            "the diff of a pin lists levels by growth and not by size of the move",
            "key=lambda item: (-item[1].size, item[0])",
            "key=lambda item: (-item[1].factor, item[0])",
            ""
            "test_store_commands.py::test_the_diff_of_a_pin_lists_the_largest_move_first_up_or_down",
        ),
    ),
    *of(
        "reports/registry/retention.py",
        (
            "anchor_of_a_broken_night",
            "the anchor to keep is that of the newest night even if it is not whole",
            " and run.manifest.whole:",
            ":",
            "test_evidence.py::test_the_anchor_that_is_spared_is_that_of_the_newest_whole_night",
        ),
    ),
    *of(
        "reports/registry/runs_page.py",
        (
            "undated_damage_is_old",
            "a damaged folder without a date is the oldest",
            'key=lambda e: (e.created or "\\uffff", e.name)',
            "key=lambda e: (e.created, e.name)",
            "test_runs_page.py",
        ),
    ),
    *of(
        "reports/registry/several.py",
        (
            "blocked_gate_held_in_the_table",
            "what could not be compared held, in the table of several runs",
            "cells[i][0] += m.verdict is Verdict.PASS",
            "cells[i][0] += m.verdict is not Verdict.FAIL",
            "test_compare_several.py",
        ),
    ),
    *of(
        "reports/registry/shared_index.py",
        (
            "future_runs_never_kept",
            "a run dated ahead of the clock is read anew by every list",
            "return timedelta(0) <= age < JUDGED",
            "return age < JUDGED",
            "test_shared.py",
        ),
    ),
    *of(
        "reports/registry/side_by_side.py",
        (
            "equal_runs_changed",
            "two equal runs of one failure changed",
            "changed = bool(decision.changes) and not found.equal",
            "changed = bool(decision.changes) or not found.equal",
            "test_compare_page.py test_equal_nights.py",
        ),
    ),
    *of(
        "reports/store/claims.py",
        (
            "retired_name_is_held",
            "a name that was retired is still its writer's",
            "return token in inside and RETIRED not in inside",
            "return token in inside",
            "test_claims.py test_lost_replies.py test_shared.py",
        ),
    ),
    *of(
        "reports/store/examine.py",
        (
            "negative_value_passes_in_lists",
            "a list counts a gate with a value below 0 as passed",
            "np.isfinite(value) & (value <= tolerance) & (value >= 0)",
            "np.isfinite(value) & (value <= tolerance)",
            "test_index.py::test_the_index_judges_a_row_as_a_run_does",
        ),
    ),
    *of(
        "reports/store/failures.py",
        (
            "deleted_failures_are_none",
            "a deleted file of failures is none that was stored",
            "if not os.path.lexists(path) and path.name not in (checksums or {}):",
            "if not os.path.lexists(path):",
            "test_store.py test_page_data.py",
        ),
    ),
    *of(
        "reports/store/gathered.py",
        (
            "compacted_with_what_was_replaced",
            "values of a changed or deleted run stay in the compacted file",
            "tables.append(table.filter(kept))",
            "tables.append(table)",
            "test_attacks.py::test_values_that_were_gathered_anew_are_kept_once",
        ),
    ),
    *of(
        "reports/store/index.py",
        (
            "signature_without_time_of_status",
            "a file whose time of modification was set back counts as unchanged",
            'times = f"{status.st_mtime_ns}.{status.st_ctime_ns}"',
            'times = f"{status.st_mtime_ns}"',
            "test_index.py::test_a_run_that_changed_is_checked_again",
        ),
    ),
    *of(
        "reports/store/manifest.py",
        (
            "selected_run_is_whole",
            "a night of a few cases counts as whole",
            "not (self.fault or self.selected)",
            "not self.fault",
            "test_hosts.py::test_the_anchor_is_the_oldest_healthy_night_and_does_not_follow",
        ),
    ),
    *of(
        "reports/store/objects.py",
        (
            "run_being_deleted_is_listed",
            "a run whose deletion was interrupted is a run",
            'n for n in listed if n[0] != "." and f"{GONE}{n}" not in listed',
            'n for n in listed if n[0] != "."',
            ""
            "test_lost_replies.py::test_a_deletion_killed_at_any_request_leaves_no_run_with_files_missing",
        ),
    ),
    *of(
        "reports/store/query.py",
        (
            "folder_name_as_pattern",
            "the name of a folder is a pattern to DuckDB",
            "alone = [glob.escape(self.files[i]) for i",
            "alone = [self.files[i] for i",
            "test_history.py test_index.py test_store_commands.py",
        ),
    ),
    *of(
        "reports/store/reader.py",
        (
            "long_lists_not_counted",
            "a column of lists may hold any number of values",
            "if metadata.num_rows > ROWS or values > VALUES or unpacked > UNPACKED_BYTES:",
            "if metadata.num_rows > ROWS or unpacked > UNPACKED_BYTES:",
            "test_hostile_folders.py test_attacks.py",
        ),
    ),
    *of(
        "reports/store/runs.py",
        (
            "copy_by_alphabet",
            "of copies the first by name counts, not the one in the folder of its name",
            "sorted(runs, key=lambda run: run.folder.name != run.manifest.id)",
            "sorted(runs, key=lambda run: run.folder.name)",
            "test_store.py test_hostile_folders.py test_index.py",
        ),
    ),
    *of(
        "reports/store/schema.py",
        (
            "newer_schema_read",
            "a run of a newer version is read as one of today",
            "if schema > SCHEMA:",
            "if schema > SCHEMA + 1:",
            "test_store.py::test_a_newer_schema_asks_for_an_update",
        ),
    ),
    *of(
        "reports/store/sending.py",
        (
            "sent_by_name_not_by_size",
            "a truncated object counts as sent",
            "sizes.items() <= there.items()",
            "sizes.keys() <= there.keys()",
            "test_claims.py::test_a_file_that_the_storage_cut_short_is_not_there",
        ),
    ),
    *of(
        "reports/store/several.py",
        (
            "helpers_share_all_folders",
            "each process reads every new folder",
            "shares = [new[ahead:][i::processes] for i in range(processes)]",
            "shares = [new for _ in range(processes)]",
            "test_several.py",
        ),
    ),
    *of(
        "reports/store/shared.py",
        (
            "shorter_object_taken",
            "an object that is shorter than listed becomes part of the copy",
            "if (aside / file).stat().st_size != size:",
            "if (aside / file).stat().st_size > size:",
            "test_lost_replies.py::test_a_half_fetched_run_is_no_run_of_the_copy",
        ),
    ),
    *of(
        "reports/store/timings.py",
        (
            "unmeasured_misses_its_goal",
            "what was not timed missed its goal",
            "if math.isnan(self.value) or math.isnan(self.goal):",
            "if math.isnan(self.goal):",
            "test_bench_sides.py test_speed_history.py test_bench.py",
        ),
    ),
    *of(
        "reports/store/unsent.py",
        (
            "unsent_run_locked_after_it_moved",
            "a run that another process sent meanwhile is taken to be there",
            "yield _lock(handle) and _is(handle, folder)",
            "yield _lock(handle)",
            "test_claims.py::test_a_run_that_was_sent_meanwhile_is_not_sent",
        ),
    ),
    *of(
        "reports/store/writer.py",
        (
            "second_writer_fails",
            "a second run of the same second is lost",
            "if not os.path.lexists(root / name) and (",
            "if True or (",
            "test_store.py::test_two_writers_of_one_id_both_survive",
        ),
    ),
    *of(
        "reports/verdict/vanished.py",
        (
            "retired_for_ever",
            "work that was retired once is never expected again",
            "and _time(seen.created) < _time(self.until)",
            "",
            "test_vanished.py",
        ),
        (
            "part_of_a_night_is_evidence",
            "a night of some cases is taken for a whole one",
            "        old.whole\n",
            "        True\n",
            "test_vanished.py",
        ),
    ),
    *of(
        "reports/verdict/agreement.py",
        (
            "tolerance_equals_itself",
            "a tolerance that changed is compared with itself",
            "(a.value, b.value), (a.tolerance, b.tolerance)",
            "(a.value, b.value), (a.tolerance, a.tolerance)",
            "test_equal_nights.py test_compare_page.py test_verdicts.py",
        ),
    ),
    *of(
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
    ),
    *of(
        "reports/verdict/change_points.py",
        (
            "level_by_mean",
            "a mean for a median: one outlier moves a level",
            "float(np.median(part)) for part in",
            "float(np.mean(part)) for part in",
            "test_change_points.py test_speed_history.py",
        ),
    ),
    *of(
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
    ),
    *of(
        "reports/verdict/completeness.py",
        (
            "ports_have_no_contract",
            "runs of ports have no contract",
            "frozenset((RunKind.NIGHTLY, RunKind.SHARD, RunKind.PORT))",
            "frozenset((RunKind.NIGHTLY, RunKind.SHARD))",
            "test_completeness.py test_verdicts.py",
        ),
    ),
    *of(
        "reports/verdict/decide.py",
        (
            "missing_suites_of_the_other_reference",
            "live suites are excused in a live night after a recorded one, and asked of a "
            "recorded one",
            '(now, then) == ("recorded", "live")',
            '(now, then) == ("live", "recorded")',
            ""
            "test_verdicts.py::test_what_asks_the_live_reference_is_not_missed_where_recordings_answer",
        ),
        (
            "selection_of_the_baseline",
            "the selection of the other run decides which suites are missing",
            "if baseline is None or run.manifest.selected:",
            "if baseline is None or baseline.manifest.selected:",
            "test_verdicts.py",
        ),
    ),
    *of(
        "reports/verdict/drift.py",
        (
            "pin_of_another_reference_preferred",
            "of other machines' pins one of another kind of reference is preferred",
            "others.sort(key=lambda g: g.environment.reference.kind != kind)",
            "others.sort(key=lambda g: g.environment.reference.kind == kind)",
            ""
            "test_hosts.py::test_of_other_machines_one_with_the_same_reference_is_preferred_then_the_newest",
        ),
        (
            "rescaled_by_the_new_level_alone",
            "a pinned level that rested on its tolerances is compared although they changed",
            "and then.floored + level.floored:",
            "and level.floored:",
            "test_hosts.py::test_a_level_that_rested_on_another_tolerance_has_no_ratio",
        ),
    ),
    *of(
        "reports/verdict/history.py",
        (
            "nan_night_left_out",
            "a night's NaN is left out of its worst share",
            "present = [v for v in values if v is not None]",
            "present = [v for v in values if v is not None and not math.isnan(v)]",
            "test_history.py test_hosts.py",
        ),
        (
            "damaged_run_ends_its_work",
            "runs of the same work as a damaged one are taken for other work",
            'answered = {*broken, *columns["run"].tolist()}',
            'answered = set(columns["run"].tolist())',
            "test_history.py test_evidence.py test_hostile_folders.py",
        ),
    ),
    *of(
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
            ""
            "test_hosts.py::test_what_does_not_repeat_counts_with_its_newest_values_and_is_pinned_at_its_largest",
        ),
    ),
    *of(
        "reports/verdict/noise.py",
        (
            "step_within_the_floor_of_what_was_seen",
            "a value just beyond all that was seen counts as one that never was",
            "now > max(logs) + floor or now < min(logs) - floor",
            "now > max(logs) or now < min(logs)",
            "test_rates.py::test_a_step_is_far_and_unseen",
        ),
    ),
    *of(
        "reports/verdict/pins.py",
        (
            "bars_in_the_name_of_a_case",
            "a case with bars in its name is torn apart",
            'parts = name.rsplit(" | ", 3)',
            'parts = name.split(" | ", 3)',
            "test_steps.py::test_every_level_that_was_written_is_read",
        ),
    ),
    *of(
        "reports/verdict/sentences.py",
        (
            "pin_of_other_work_ends_first_nights",
            "a night whose own pin has no level of its work is no first night",
            "if any(h.same and h.comparable for h in comparisons):",
            "if any(h.same for h in comparisons):",
            "test_first_night.py",
        ),
    ),
    *of(
        "reports/verdict/several.py",
        (
            "work_compared_with_itself",
            "the work of a cell is compared with its own",
            "identity = m.identity if identity is None else identity",
            "identity = m.identity",
            "test_compare_several.py",
        ),
    ),
    *of(
        "reports/verdict/since.py",
        (
            "held_at_its_bound_fails",
            "a run whose value was exactly at its tolerance counts as one that failed",
            "if share <= 1:",
            "if share < 1:",
            "test_since.py::test_a_gate_fails_since_the_run_after_the_last_in_which_it_held",
        ),
    ),
)
