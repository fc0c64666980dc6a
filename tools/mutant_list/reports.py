"""Mutants of what decides in `reports`: verdicts, changes, levels, history, the store."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_VERDICTS = "test_verdicts.py"
_HOSTS = "test_hosts.py"
_GPUS = "test_gpu_identity.py"
_HISTORY = "test_history.py"
_STORE = "test_store.py"
_SHARED = "test_shared.py"
_LOST = "test_lost_replies.py"
_CLAIMS = "test_claims.py"
_RATES = "test_rates.py"
_COMMANDS = "test_store_commands.py"

VERDICTS = of(
    "reports/verdict/decide.py",
    (
        "lost_suites_forgiven",
        "any suite may be missing where recordings answer",
        "        names |= LIVE_SUITES",
        "        return ()",
        f"{_VERDICTS}::test_what_asks_the_live_reference_is_not_missed_where_recordings_answer",
    ),
    (
        "incomplete_before_failed",
        "an incomplete suite hides a failure",
        "if counts.new + counts.persisting:",
        "if counts.new + counts.persisting and whole:",
        f"{_VERDICTS}::test_a_failure_outweighs_an_incomplete_suite",
    ),
    (
        "old_failures_pass",
        "a failure that was there before is no regression",
        "if counts.new + counts.persisting:",
        "if counts.new:",
        f"{_VERDICTS}::test_failures_are_new_persisting_or_fixed {_VERDICTS}",
    ),
    (
        "vanished_suite_passes",
        "a suite that the baseline ran and this run does not know is not missed",
        "all(suite.whole for suite in suites) and not missing",
        "all(suite.whole for suite in suites)",
        f"{_RATES}::test_a_suite_that_vanished_is_incomplete_unless_cases_were_selected",
    ),
    (
        "selected_cases_lack_suites",
        "a night of a few cases is incomplete for what it was not asked",
        "if baseline is None or run.manifest.selected:",
        "if baseline is None:",
        f"{_RATES}::test_a_suite_that_vanished_is_incomplete_unless_cases_were_selected",
    ),
    (
        "one_step_away_passes",
        "one value beyond its history passes",
        "if counts.worse:",
        "if counts.worse > 1:",
        f"{_RATES}::test_a_step_regresses_and_says_from_what {_RATES}",
    ),
    (
        "changed_in_another_environment",
        "a failure that another environment fixed makes the night CHANGED",
        "if baseline and (counts.changed or (counts.fixed and not environment)):",
        "if baseline and (counts.changed or counts.fixed):",
        _VERDICTS,
    ),
    (
        "sharpest_edge_before_the_earliest_stage",
        "the headline is the sharpest edge, which may hold nothing but logits",
        "at = (m.stage < 0, m.stage, edge_rank(m.edge))",
        "at = (edge_rank(m.edge), m.stage < 0, m.stage)",
        f"{_VERDICTS}::test_the_earliest_stage_is_named_on_whichever_edge",
    ),
    (
        "old_failures_in_the_headline",
        "a failure that was there before is named before a new one",
        "return m.verdict is not Verdict.FAIL, not is_new",
        "return m.verdict is not Verdict.FAIL, False",
        _VERDICTS,
    ),
    (
        "incomparable_outranks_nothing",
        "a run in which nothing could be compared passes for the rest",
        "    if counts.not_comparable:\n        first",
        "    if counts.not_comparable > counts.gates:\n        first",
        f"{_VERDICTS}::test_an_incomparable_measurement_is_not_a_pass",
    ),
)

CHANGES = of(
    "reports/verdict/changes.py",
    (
        "identity_not_compared",
        "values of other work are compared",
        "if old.identity != m.identity:",
        "if old.metric != m.metric:",
        f"{_VERDICTS}::test_another_identity_is_never_a_delta",
    ),
    (
        "noisy_baseline_repeats",
        "a value that its baseline could not repeat is held to repeat",
        "alike = exact and old.deterministic is not False and m.device == old.device",
        "alike = exact and m.device == old.device",
        f"{_VERDICTS} {_RATES}",
    ),
    (
        "another_device_repeats",
        "a value of another class of device is held to repeat",
        "alike = exact and old.deterministic is not False and m.device == old.device",
        "alike = exact and old.deterministic is not False",
        f"{_VERDICTS}::test_only_equal_work_in_equal_environments_is_changed {_VERDICTS}",
    ),
    (
        "nan_differs_from_nan",
        "a note that is no number twice has changed",
        "return a == b or (math.isnan(a) and math.isnan(b))",
        "return a == b",
        f"{_VERDICTS} test_page.py",
    ),
    (
        "varied_once_repeats",
        "a value that varied once is held to repeat",
        "m.deterministic is True and not (key in past and past[key].varied)",
        "m.deterministic is True",
        f"{_RATES} {_VERDICTS} {_HISTORY}",
    ),
    (
        "gone_gates_unreported",
        "a gate that is no longer measured is reported only where it failed",
        "if key not in measured and old.verdict is not Verdict.INFO",
        "if key not in measured and old.verdict is Verdict.FAIL",
        f"{_VERDICTS}::test_a_gate_that_vanished_is_reported",
    ),
    (
        "warnings_regress",
        "a warning of a probe is a failure",
        "f for f in findings if f.severity is Severity.ERROR}",
        "f for f in findings if f.severity in (Severity.ERROR, Severity.WARNING)}",
        f"{_VERDICTS}::test_only_findings_of_severity_error_regress",
        "plain",
    ),
    (
        "empty_suite_is_nothing_lost",
        "a suite that failed before it planned anything counts as nothing not run",
        "max(1, suite.planned - suite.executed)",
        "suite.planned - suite.executed",
        f"{_VERDICTS} test_program.py",
    ),
    (
        "drifts_not_counted",
        "levels that drifted are reported and do not count",
        "worse=of(What.WORSE) + of(What.DRIFTED),",
        "worse=of(What.WORSE),",
        f"{_RATES}::test_a_drift_is_held_against_the_pinned_run_of_the_same_work_only {_HOSTS}",
    ),
    (
        "nearest_drift_first",
        "the level that drifted least is the gravest",
        "                -c.excess,",
        "                c.excess,",
        f"{_HOSTS}::test_a_change_beyond_rounding_names_both_machines_the_furthest_first {_HOSTS}",
    ),
)

DRIFT = of(
    "reports/verdict/drift.py",
    (
        "levels_may_fall",
        "a level that fell below its limit is not told",
        "return not 1 / self.limit <= self.ratio <= self.limit",
        "return not self.ratio <= self.limit",
        f"{_HOSTS} {_COMMANDS} {_RATES}",
    ),
    (
        "one_draw_of_rounding",
        "two machines may be apart by one draw of rounding only",
        "math.exp(DRIFT_DEVIATIONS * math.sqrt(2) * deviation)",
        "math.exp(DRIFT_DEVIATIONS * deviation)",
        _HOSTS,
    ),
    (
        "own_machine_may_scatter",
        "levels of one machine may be apart as those of two",
        "    if same:\n        return base",
        "    if same and not deviation:\n        return base",
        _HOSTS,
    ),
    (
        "levels_of_other_work",
        "levels of other work are compared",
        "if pinned is None or pinned.work != level.work:",
        "if pinned is None:",
        f"{_RATES}::test_a_drift_is_held_against_the_pinned_run_of_the_same_work_only {_HOSTS}",
    ),
    (
        "any_pin_is_its_own",
        "the first pinned baseline is taken for one of this machine",
        "own = [g for g in candidates if machine is not None and g.fingerprint == machine][:1]",
        "own = [g for g in candidates if machine is not None][:1]",
        _HOSTS,
    ),
    (
        "reference_kind_not_preferred",
        "of other machines' pinned baselines one with another kind of reference is taken",
        "others.sort(key=lambda g: g.environment.reference.kind != kind)",
        "others.sort(key=lambda g: g.environment.reference.kind is None)",
        f"{_HOSTS} {_COMMANDS}",
    ),
    (
        "spread_of_the_pin_alone",
        "a pinned baseline that holds no spread leaves no room for rounding",
        "map(max, zip(pinned.spread, level.spread, strict=True))",
        "pinned.spread",
        _HOSTS,
    ),
    (
        "rescaled_without_floored_gates",
        "a level that does not rest on its tolerance is not compared when that changes",
        "if then.tolerance != level.tolerance and then.floored + level.floored:",
        "if then.tolerance != level.tolerance:",
        _HOSTS,
    ),
    (
        "loosened_tolerance_is_a_drift",
        "a level that rests on a tolerance which changed is compared",
        "rescaled.append(Rescaled(group, then.tolerance, level.tolerance))\n            continue",
        "rescaled.append(Rescaled(group, then.tolerance, level.tolerance))",
        f"{_HOSTS}::test_a_loosened_tolerance_is_no_drift",
    ),
)

LEVELS = of(
    "reports/verdict/levels.py",
    (
        "arithmetic_level",
        "a level is an arithmetic mean, which its worst gate decides",
        "typical=_rounded(statistics.geometric_mean(values)),",
        "typical=_rounded(statistics.fmean(values)),",
        f"{_HOSTS} {_COMMANDS} {_RATES}",
    ),
    (
        "near_zero_counts",
        "values far below their tolerance move the level freely",
        "values = [max(pair) for pair in zip(raw, floors, strict=True)]",
        "values = [max(pair[0], 1e-30) for pair in zip(raw, floors, strict=True)]",
        f"{_HOSTS} {_COMMANDS} {_RATES}",
    ),
    (
        "ratios_have_levels",
        "a level is formed from ratios of two errors",
        "if gated and m.kind in KINDS and m.metric not in _RATIOS:",
        "if gated and m.kind in KINDS:",
        f"{_COMMANDS}::test_a_ratio_of_errors_has_no_level_of_its_own",
    ),
    (
        "single_draws_have_levels",
        "a single draw of what was pooled has a level",
        "if group not in pooled}",
        "if group not in ()}",
        f"{_HOSTS}::test_what_was_pooled_has_its_level_there",
    ),
    (
        "oldest_values_stand_for_a_gate",
        "a gate that does not repeat counts with its oldest values",
        "return settle((*earlier[1 - RECENT :], m.value))",
        "return settle((*earlier[: RECENT - 1], m.value))",
        f"{_HOSTS} {_RATES} {_COMMANDS}",
    ),
    (
        "spread_of_one_gate",
        "the spread over draws lacks the factor of the jackknife",
        "return math.sqrt((draws - 1) * statistics.pvariance(estimates))",
        "return math.sqrt(statistics.pvariance(estimates))",
        f"{_HOSTS}::test_the_spread_of_a_level_is_that_of_repeating_it",
    ),
    (
        "half_calibrated_spread",
        "a group has the spread of those of its gates that were calibrated",
        "if len(values) == len(gates):",
        "if values:",
        f"{_HOSTS}",
    ),
    (
        "scatter_of_independent_gates",
        "the spread of a level is taken over gates instead of over seeds",
        "typical = [statistics.fmean(map(math.log, column)) for column in seeds]",
        "typical = [math.log(column[0]) for column in seeds]",
        f"{_HOSTS}::test_the_spread_of_a_level_is_that_of_repeating_it",
    ),
)

REGISTRY = (
    *of(
        "reports/verdict/anchors.py",
        (
            "anchor_of_the_newest",
            "the newest healthy night is the anchor, which follows a slow drift",
            "    for info in earlier:\n        held",
            "    for info in reversed(earlier):\n        held",
            f"{_HOSTS}::test_the_anchor_is_the_oldest_healthy_night_and_does_not_follow",
        ),
        (
            "partial_anchor",
            "a night that measured some gates of a level is its anchor",
            "if gates == len(levels[level]):",
            "if gates <= len(levels[level]):",
            f"{_HOSTS}",
        ),
        (
            "ill_anchor",
            "a night that failed may be an anchor",
            "and (old := _read(info)) and healthy(old):",
            "and (old := _read(info)):",
            f"{_HOSTS}",
        ),
        (
            "anchor_of_another_kind",
            "runs of tests anchor nights",
            "if old.manifest.shares_subject(run.manifest)\n",
            "if old.kind is not None\n",
            f"{_HOSTS}",
        ),
    ),
    *of(
        "reports/verdict/pins.py",
        (
            "oldest_pinning_first",
            "of two pinned runs the older one is preferred",
            "newest = sorted(pins, key=lambda pin: (pin.pinned, pin.run), reverse=True)",
            "newest = sorted(pins, key=lambda pin: (pin.pinned, pin.run))",
            f"{_HOSTS} {_COMMANDS}",
        ),
        (
            "pinned_at_its_median",
            "of a gate that does not repeat the median is pinned instead of the largest",
            "levels(run.measurements, past, manifest.spreads, max),",
            "levels(run.measurements, past, manifest.spreads),",
            f"{_HOSTS} {_COMMANDS}",
        ),
        (
            "pin_of_another_schema",
            "a pinned baseline of another schema is used",
            "if schema != SCHEMA:",
            "if not schema:",
            f"{_COMMANDS}::test_a_damaged_pin_is_named {_HOSTS}",
        ),
        (
            "pin_by_versions",
            "a pinning after an update lies beside the one it should replace",
            'machine = fingerprint(environment, versions=False) or "unknown"',
            'machine = fingerprint(environment) or "unknown"',
            f"{_COMMANDS} {_HOSTS}",
        ),
    ),
    *of(
        "reports/registry/pin.py",
        (
            "dirty_tree_pinned",
            "a run is pinned in a tree with uncommitted changes",
            "if commit is None or dirty:",
            "if commit is None:",
            f"{_COMMANDS}::test_a_dirty_tree_and_an_empty_reason_are_refused",
        ),
        (
            "partial_night_pinned",
            "a night of a few cases is pinned",
            "bool(manifest.selected),",
            "False,",
            f"{_COMMANDS}::test_only_a_whole_healthy_night_is_pinned",
        ),
        (
            "failed_night_pinned",
            "a night that broke a tolerance is pinned",
            "decision.exit_code is not ExitCode.PASS,",
            "decision.exit_code is ExitCode.USAGE,",
            f"{_COMMANDS}::test_only_a_whole_healthy_night_is_pinned",
        ),
    ),
    *of(
        "reports/page/sections/marks.py",
        (
            "drifts_unmarked",
            "a section whose level drifted is not marked",
            "_GRAVE = (What.NEW, What.PERSISTING, What.WORSE, What.DRIFTED)",
            "_GRAVE = (What.NEW, What.PERSISTING, What.WORSE)",
            f"{_HOSTS}::test_red_sections_are_marked",
        ),
        (
            "warnings_marked_red",
            "a warning marks its section as failed",
            "for f in findings if f.severity is Severity.ERROR}",
            "for f in findings if f.severity is not Severity.OK}",
            f"{_HOSTS}::test_red_sections_are_marked test_page.py",
        ),
        (
            "bf16_marked_elsewhere",
            "what failed in bfloat16 marks another section",
            'if m.edge.startswith("jaxbf16"):',
            'if m.edge.startswith("bf16"):',
            f"{_HOSTS}::test_red_sections_are_marked",
        ),
    ),
)

STORE = (
    *of(
        "reports/store/runs.py",
        (
            "hidden_folders_are_runs",
            "what an interrupted write left is listed",
            'if entry.name.startswith("."):\n                        continue',
            'if entry.name == ".":\n                        continue',
            f"{_STORE}",
        ),
        (
            "copy_counts_before_its_original",
            "of copies of a run one in another folder counts",
            "key=lambda run: run.folder.name != run.manifest.id",
            "key=lambda run: run.folder.name == run.manifest.id",
            f"{_STORE}::test_copies_of_a_run_count_once_and_are_named",
        ),
        (
            "runs_by_name",
            "runs are ordered by name instead of by time",
            "key=lambda run: (run.manifest.created, str(run.folder))",
            "key=lambda run: str(run.folder)",
            f"{_STORE}::test_runs_are_listed_oldest_first_by_their_time_not_their_name",
        ),
    ),
    *of(
        "reports/store/writer.py",
        (
            "second_writer_fails",
            "a second run of the same second is lost",
            "if not os.path.lexists(root / name) and (",
            "if True or (",
            f"{_STORE}::test_two_writers_of_one_id_both_survive",
        ),
        (
            "rows_of_another_kind_stored",
            "rows that are not of the run's kind are dropped without a word",
            "if part and name not in FILES[kind]]",
            "if not part and name not in FILES[kind] and name in part]",
            "test_bench.py::test_rows_of_another_kind_are_refused",
        ),
    ),
    *of(
        "reports/store/shared.py",
        (
            "half_a_run_is_fetched",
            "what a writer that was killed had sent is a run",
            "if MANIFEST not in inside:\n            return",
            "if not inside:\n            return",
            f"{_SHARED}::test_a_killed_writer_leaves_no_run_and_its_machine_sends_the_run_later",
        ),
    ),
    *of(
        "reports/store/sending.py",
        (
            "manifest_sent_in_turn",
            "run.json is sent before the other files have come",
            "if p.name != MANIFEST and p.name[0]",
            "if p.name[0]",
            f"{_LOST}::test_a_writer_killed_at_any_request_loses_nothing_and_sends_nothing_twice",
        ),
    ),
    *of(
        "reports/store/objects.py",
        (
            "claim_asks_nobody",
            "an object is written although another writer has written it",
            '{"mode": "create"}, PAUSE',
            "{}, PAUSE",
            f"{_CLAIMS}::test_a_write_says_whose_content_is_there",
        ),
    ),
    *of(
        "reports/store/claims.py",
        (
            "stored_name_claimed",
            "a name that a run has is free for another",
            "objects.inside(name) or not objects.create",
            "not objects.create",
            f"{_CLAIMS}::test_a_run_without_a_claim_has_its_name",
        ),
    ),
    *of(
        "reports/store/sending.py",
        (
            "claim_lost_and_sent",
            "a writer publishes below a name that was taken from it",
            "if _is_there(objects, folder, name) and held(objects, name, token):",
            "if _is_there(objects, folder, name):",
            f"{_LOST}::test_a_cleaner_leaves_a_run_that_is_published_while_it_looks",
        ),
    ),
    *of(
        "reports/store/shared.py",
        (
            "gone_runs_stay",
            "a run that another machine deleted stays in the copy",
            "for name in here - there:",
            "for name in here - here:",
            f"{_SHARED}::test_a_run_that_goes_there_goes_here",
        ),
        (
            "all_fetched_again",
            "each command copies every run again",
            "sorted(there - here)",
            "sorted(there)",
            f"{_SHARED}::test_what_is_here_is_asked_for_once",
        ),
        (
            "living_writer_swept",
            "what a writer has sent so far is deleted under its hands",
            "total_seconds() > ABANDONED",
            "total_seconds() > -ABANDONED",
            f"{_CLAIMS}::test_an_unfinished_run_goes_when_nothing_came_for_an_hour",
        ),
        (
            "unsent_forgotten",
            "a run that the storage refused once is never sent",
            "                if not ours:\n",
            "                if ours:\n",
            f"{_SHARED}::test_a_run_that_the_storage_refuses_is_kept_and_sent_later",
        ),
    ),
    *of(
        "reports/store/schema.py",
        (
            "newer_schema_read",
            "a run of a newer version is read as one of today",
            "if schema > SCHEMA:",
            "if schema > SCHEMA + 1:",
            f"{_STORE}::test_a_newer_schema_asks_for_an_update",
        ),
        (
            "first_migration_skipped",
            "an old run is migrated from the schema after its own",
            "for step in range(schema, SCHEMA):",
            "for step in range(schema + 1, SCHEMA):",
            f"{_STORE}::test_a_run_of_schema_1_is_read_as_one_of_today",
        ),
    ),
    *of(
        "reports/verdict/history.py",
        (
            "planted_night_in_history",
            "a night with a planted fault is a baseline",
            " and not (old.manifest.fault or mixed):",
            " and not mixed:",
            f"{_HISTORY}::test_a_run_with_a_planted_fault_is_no_baseline",
        ),
        (
            "run_is_its_own_baseline",
            "a run is compared with itself",
            "if old.manifest.created < run.manifest.created",
            "if old.manifest.created <= run.manifest.created",
            f"{_HISTORY}::test_the_run_itself_is_not_its_baseline",
        ),
        (
            "baseline_of_any_machine",
            "the newest run is the baseline, on whichever machine",
            "key=lambda turn: (elsewhere(turn), turn)",
            "key=lambda turn: turn",
            f"{_HOSTS}::test_the_baseline_is_of_the_same_machine_where_there_is_one",
        ),
        (
            "series_backwards",
            "a trend runs from the newest run to the oldest",
            'runs - 1 - answer["run"][gated]',
            'answer["run"][gated]',
            f"{_HISTORY}::test_the_series_holds_worst_shares_and_gaps",
        ),
        (
            "oldest_window",
            "a noisy value is compared with the oldest runs of the window",
            'np.isin(answer["run"], alike[:NOISE_WINDOW])',
            'np.isin(answer["run"], alike[-NOISE_WINDOW:])',
            f"{_HISTORY} {_RATES}",
        ),
        (
            "past_of_any_machine",
            "values of another machine are a gate's past",
            "if old.manifest.environment.machine == machine]",
            "if old.manifest.environment.machine]",
            f"{_HISTORY} {_HOSTS} {_RATES}",
        ),
    ),
    *of(
        "reports/verdict/noise.py",
        (
            "far_or_unseen",
            "a value is a step where it is far or unseen",
            "return 10.0 ** (now - middle) if far and unseen else None",
            "return 10.0 ** (now - middle) if far or unseen else None",
            f"{_RATES}",
        ),
        (
            "one_value_too_few",
            "five earlier values say nothing",
            "if len(logs) < NOISE_LEAST or not",
            "if len(logs) <= NOISE_LEAST or not",
            f"{_RATES}::test_a_step_is_far_and_unseen",
        ),
        (
            "one_deviation_is_far",
            "one deviation from the median is far",
            "max(NOISE_MADS * mad, floor)",
            "max(mad, floor)",
            f"{_RATES}",
        ),
    ),
    *of(
        "reports/registry/retention.py",
        (
            "oldest_kept",
            "pruning keeps the oldest runs",
            "for run in runs[-keep:]}",
            "for run in runs[:keep]}",
            f"{_COMMANDS}::test_pruning_spares_what_others_are_held_against",
        ),
        (
            "pinned_pruned",
            "a pinned run is pruned",
            "if is_pinned(root, run.manifest):",
            "if is_pinned(root, run.manifest) and not run.folder:",
            f"{_COMMANDS}::test_pruning_spares_what_others_are_held_against",
        ),
        (
            "anchor_pruned",
            "the anchor of a machine is pruned",
            "elif name in anchors:",
            "elif name in anchors and name in baselines:",
            f"{_HOSTS}::test_the_anchor_is_the_oldest_healthy_night_and_does_not_follow",
        ),
    ),
    *of(
        "reports/nightly/shards.py",
        (
            "shards_from_zero",
            "shard 1 is the second part of a plan",
            "tuple(plan[self.index - 1 :: self.count])",
            "tuple(plan[self.index :: self.count])",
            "test_workflows.py::test_shards_cover_a_plan_once",
        ),
        (
            "lost_shard_merged",
            "a missing shard is merged without a word",
            "if missing and not partial and not known.keys() >= set(missing):",
            "if missing and not indices:",
            "test_workflows.py::test_shards_that_do_not_belong_together_are_refused "
            "test_workflows.py",
        ),
        (
            "shards_of_two_commits",
            "shards of two commits are merged",
            'for part in (*code, "plan", "selected", "fault", "checkpoint"):',
            'for part in ("plan", "selected", "fault", "checkpoint"):',
            "test_workflows.py::test_shards_that_do_not_belong_together_are_refused",
        ),
        (
            "lost_shard_ran",
            "a suite of which a shard is lost ran",
            'status="ran" if all(part.status == "ran" for part in parts) else "failed",',
            'status="ran" if parts else "failed",',
            "test_workflows.py::test_a_lost_shard_is_incomplete_and_named test_workflows.py",
        ),
    ),
)

HOST = (
    *of(
        "reports/provenance/host.py",
        (
            "half_known_processor",
            "a processor of which one field is unknown equals itself",
            "if any(parts[name] == UNKNOWN for name in needed",
            "if all(parts[name] == UNKNOWN for name in needed",
            f"{_HOSTS}",
        ),
        (
            "flags_choose_nothing",
            "flags that choose kernels do not tell machines apart",
            "parts |= {n: v for n, v in environment.flags.items() if v}",
            "parts |= {n: v for n, v in environment.flags.items() if not v}",
            f"{_HOSTS}::test_whatever_chooses_kernels_is_another_machine_and_is_named",
        ),
        (
            "half_known_gpu",
            "a GPU whose driver cannot be read equals itself",
            '"cuda": [f"GPU {n}" for n in GPU_FIELDS],',
            '"cuda": [],',
            _GPUS,
        ),
        (
            "drivers_choose_nothing",
            "two drivers are one machine",
            'if device.kind == "cuda":\n        parts |=',
            'if device.kind == "gpu":\n        parts |=',
            _GPUS,
        ),
    ),
    *of(
        "reports/provenance/gpu.py",
        (
            "one_of_several_gpus",
            "where the GPUs of a machine differ, any one speaks for all",
            "if len(lines) == 1 else",
            "if lines else",
            _GPUS,
        ),
    ),
    *of(
        "reports/registry/lookup.py",
        (
            "run_of_last_week_is_new",
            "the days of a run's age are dropped: the gate is green by what an earlier job stored",
            ".total_seconds() / 3600",
            ".seconds / 3600",
            "test_gpu_workflow.py",
        ),
    ),
    *of(
        "parity/executors/machine.py",
        (
            "instructions_ignored",
            "processors with other vector units are one machine",
            "arithmetic = sorted({flag for flag in flags.split() if flag.startswith(_ARITHMETIC)})",
            'arithmetic = sorted({flag for flag in flags.split() if flag.startswith("fp")})',
            f"{_HOSTS}::test_a_processor_is_more_than_its_name",
        ),
    ),
    *of(
        "reports/cli/views/explain.py",
        (
            "explained_and_well",
            "a case that was explained counts as holding",
            'return "\\n".join([*lines, replay]), False',
            'return "\\n".join([*lines, replay]), True',
            "test_localize.py::test_an_account_names_stage_parameters_and_replay test_localize.py",
        ),
    ),
    *of(
        "reports/verdict/sentences.py",
        (
            "shared_suspected_always",
            "what both sides share is suspected although JAX left the oracle",
            "not ours <= measured - broken\n",
            "not ours <= measured\n",
            f"{_VERDICTS}::test_what_jax_and_the_oracle_share_is_suspected",
        ),
        (
            "loosest_gate_called_closest",
            "the gate furthest from its tolerance is called the closest",
            "worst = max(gates, key=lambda m: m.fraction)",
            "worst = min(gates, key=lambda m: m.fraction)",
            f"{_VERDICTS}",
        ),
    ),
    *of(
        "reports/nightly/run.py",
        (
            "planted_fault_not_noted",
            "a night with a planted fault does not say so",
            "fault=options.fault,",
            "fault=None,",
            "test_nightly.py::test_a_night_says_what_was_planted_in_it",
        ),
        (
            "live_suites_in_recorded_nights",
            "a night by recordings plans what only the live reference answers",
            "plan = tuple(part for part in plan if part not in LIVE)",
            "pass",
            "test_nightly.py::test_what_recordings_cannot_answer_is_no_part_of_a_recorded_night",
        ),
    ),
)


SETTLED = of(
    "parity/engine/measure/measurement.py",
    (
        "pass_of_nan_believed",
        "a pass whose value is no number is believed",
        "holds = math.isfinite(self.value) and 0.0 <= self.value <= self.tolerance",
        "holds = not self.value > self.tolerance",
        f"{_VERDICTS}::test_a_pass_that_its_numbers_do_not_support_fails",
    ),
    (
        "note_with_a_tolerance_believed",
        "a measurement that says it is a note is not held to its tolerance",
        "self.verdict is not Verdict.INFO or math.isnan(self.tolerance)",
        "True",
        f"{_VERDICTS}::test_a_pass_that_its_numbers_do_not_support_fails "
        f"{_VERDICTS}::test_a_pass_that_its_numbers_support_holds",
    ),
)

FINGERPRINT = of(
    "reports/provenance/host.py",
    (
        "flags_are_no_environment",
        "other flags are the same environment",
        "names = [n for n in dict.fromkeys((*theirs, *ours)) if ours.get(n) != theirs.get(n)]",
        "names = [n for n in theirs if n in ours and ours[n] != theirs[n]]",
        f"{_VERDICTS} test_hosts.py test_workflows.py",
    ),
    (
        "threads_are_no_environment",
        "another number of threads is the same environment",
        'parts |= {"threads": environment.threads}',
        'parts |= {"threads": 1}',
        f"{_VERDICTS} test_hosts.py test_workflows.py",
    ),
)

WHOLE = of(
    "reports/store/manifest.py",
    (
        "ports_judged_as_megalodon",
        "a session of ports whose originals have a kind is judged by pinned nights of Megalodon",
        "not in _OF_MEGALODON",
        "is None",
        "test_first_night.py test_sessions.py",
    ),
    (
        "half_a_suite_is_whole",
        "a suite that executed anything is whole",
        "0 < self.planned == self.executed",
        "self.executed > 0",
        f"{_VERDICTS}::test_a_suite_that_is_not_whole_is_incomplete",
    ),
    (
        "planted_night_is_whole",
        "a night with a planted fault may be an anchor",
        "not (self.fault or self.selected)",
        "not self.selected",
        f"{_HOSTS} {_COMMANDS}",
    ),
)

SUITES = of(
    "reports/nightly/suites.py",
    (
        "replay_always_equal",
        "every value is marked as repeating",
        "return second == m.value or (math.isnan(second) and math.isnan(m.value))",
        "return second is not None",
        "test_nightly.py::test_a_replay_repeats_where_it_gives_the_same_bits",
    ),
    (
        "executed_is_not_counted",
        "a suite that did not execute all it planned ran",
        "if self.executed == self.planned and not self.reason else",
        "if not self.reason else",
        "test_nightly.py::test_a_suite_ran_if_it_did_all_it_planned_and_nothing_broke_down",
    ),
    (
        "broken_case_executed",
        "a case that broke down leaves no reason",
        'suite.reason = f"{what}{type(error).__name__}: {error}"[:400]',
        "suite.reason = suite.reason",
        "test_nightly.py::test_a_case_that_breaks_down_is_incomplete",
    ),
)

SINCE = of(
    "reports/verdict/since.py",
    (
        "nan_held",
        "a gate whose value was NaN is reported as passing",
        "if share <= 1:",
        "if not share > 1:",
        "test_since.py",
    ),
    (
        "since_the_oldest_run",
        "a gate fails since the oldest run in which it held",
        "in reversed(measured):",
        "in measured:",
        "test_since.py",
    ),
    (
        "unclean_commit_acquitted",
        "one commit acquits the code though there were uncommitted changes",
        "known = planted or unclean or not changed",
        "known = planted or not changed",
        "test_since.py",
    ),
)

EXPORTS = of(
    "reports/exports/levels.py",
    (
        "nan_uses_no_tolerance",
        "exports to other tools give NaN a tolerance share of 0",
        "        return math.inf\n",
        "        return 0.0\n",
        "test_export_trackers.py test_export_command.py",
    ),
    (
        "last_share_not_largest",
        "other tools get the last gate of a group, not the closest one",
        "shares[group] = max(_share(m), shares.get(group, 0.0))",
        "shares[group] = _share(m)",
        "test_export_command.py test_export_trackers.py",
    ),
)

STEPS = of(
    "reports/exports/steps.py",
    (
        "last_case_of_a_curve",
        "a curve of a tracker is that of the last case, not of the closest",
        "values[name] = max(share, values.get(name, 0.0))",
        "values[name] = share",
        "test_export_trackers.py",
    ),
    (
        "first_training_loss",
        "the loss that a tracker draws is where training began",
        "or (None,))[-1]",
        "or (None,))[0]",
        "test_export_trackers.py",
    ),
    (
        "every_gate_held",
        "each gate counts as held in a tracker",
        "if m.verdict is Verdict.PASS)",
        "if m.verdict is not Verdict.INFO)",
        "test_export_trackers.py",
    ),
)

ACCOUNTS = of(
    "reports/nightly/accounts.py",
    (
        "account_without_the_worst",
        "the account of a port has no worst element",
        "place.worst[0] if place.worst else None",
        "None",
        "test_red_night.py::test_a_port_of_the_night_has_its_account_in_the_same_form",
    ),
)

MUTANTS = (
    *(*SINCE, *EXPORTS, *STEPS, *ACCOUNTS),
    *(*VERDICTS, *CHANGES, *SETTLED, *DRIFT, *LEVELS, *REGISTRY),
    *(*STORE, *WHOLE, *HOST, *FINGERPRINT, *SUITES),
)
