"""Mutants of the third blind round: written from the source alone, before any test was read."""

from __future__ import annotations

from tools.mutant_list.mutant import of

REPORTS_VERDICT_AGREEMENT = of(
    "reports/verdict/agreement.py",
    (
        "agreement_ignores_tolerance",
        "two runs are equal although a tolerance changed",
        "numbers = (a.value, b.value), (a.tolerance, b.tolerance)",
        "numbers = ((a.value, b.value),)",
        "test_equal_nights.py test_compare_page.py test_verdicts.py",
    ),
    (
        "agreement_findings_of_both",
        "a finding that only one run has is no difference",
        "names = found[0].keys() | found[1].keys()",
        "names = found[0].keys() & found[1].keys()",
        "test_equal_nights.py test_compare_page.py",
    ),
)
REPORTS_VERDICT_ANCHORS = of(
    "reports/verdict/anchors.py",
    (
        "anchor_of_a_part_of_a_night",
        "a run that is not whole may be an anchor",
        "\n        and old.manifest.whole\n",
        "\n",
        "test_hosts.py test_first_night.py test_evidence.py",
    ),
)
REPORTS_VERDICT_HISTORY = of(
    "reports/verdict/history.py",
    (
        "damaged_run_ends_its_work",
        "runs of the same work as a damaged one are taken for other work",
        'answered = {*broken, *columns["run"].tolist()}',
        'answered = set(columns["run"].tolist())',
        "test_history.py test_evidence.py test_hostile_folders.py",
    ),
    (
        "broken_bench_not_named",
        "a bench that cannot be read any more is left out without a word",
        "unreadable.append((old.folder, str(error)))",
        "pass",
        "test_history.py",
    ),
)
REPORTS_VERDICT_PINS = of(
    "reports/verdict/pins.py",
    (
        "pin_digest_without_levels",
        "the digest of a pinned baseline leaves out its levels",
        'if n not in ("schema", "digest")}',
        'if n not in ("schema", "digest", "groups")}',
        "test_pins.py test_adversary.py",
    ),
)
REPORTS_VERDICT_SINCE = of(
    "reports/verdict/since.py",
    (
        "only_later_run_unclean",
        "that the earlier run had uncommitted changes is not said",
        "unclean = [m for m in (before, after) if m.dirty]",
        "unclean = [m for m in (after,) if m.dirty]",
        "test_since.py test_equal_nights.py",
    ),
)
REPORTS_VERDICT_LEVELS = of(
    "reports/verdict/levels.py",
    (
        "level_work_by_order",
        "the work of a level depends on the order of its gates",
        "repr(sorted(m.identity for m in gates))",
        "repr([m.identity for m in gates])",
        "test_spreads.py test_pins.py test_hosts.py",
    ),
)
REPORTS_VERDICT_DECIDE = of(
    "reports/verdict/decide.py",
    (
        "case_without_a_host",
        "a case that no part measured counts as measured on the run's own host",
        'by_case.get(case, "" if manifest.parts else whole)',
        "by_case.get(case, whole)",
        "test_hosts.py test_verdicts.py test_fan_out.py",
    ),
)
REPORTS_VERDICT_DRIFT = of(
    "reports/verdict/drift.py",
    (
        "smaller_spread_explains",
        "of two spreads the smaller one explains a drift",
        "typical, worst = map(max, zip(pinned.spread",
        "typical, worst = map(min, zip(pinned.spread",
        "test_hosts.py test_spreads.py test_first_night.py",
    ),
)
REPORTS_STORE_CLAIMS = of(
    "reports/store/claims.py",
    (
        "claim_of_anybody_held",
        "a claim is held by any token that is not retired",
        "return token in inside and RETIRED not in inside",
        "return RETIRED not in inside",
        "test_claims.py test_lost_replies.py test_shared.py",
    ),
)
REPORTS_STORE_EXAMINE = of(
    "reports/store/examine.py",
    (
        "work_without_rows",
        "the hash of the work has the words of the gates and not which row has which",
        "        digest.update(array.indices.to_numpy(False).astype(np.int32).tobytes())\n",
        "",
        "test_index.py test_history.py",
    ),
)
REPORTS_STORE_GATHERED = of(
    "reports/store/gathered.py",
    (
        "gathered_by_size",
        "a gathered file is believed by inode and size alone",
        'now = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"',
        'now = f"{status.st_ino} {status.st_size}"',
        "test_index.py test_attacks.py",
    ),
)
REPORTS_STORE_RUNS = of(
    "reports/store/runs.py",
    (
        "copy_by_alphabet",
        "of copies the first by name counts, not the one in the folder of its name",
        "sorted(runs, key=lambda run: run.folder.name != run.manifest.id)",
        "sorted(runs, key=lambda run: run.folder.name)",
        "test_store.py test_hostile_folders.py test_index.py",
    ),
)
REPORTS_STORE_SENDING = of(
    "reports/store/sending.py",
    (
        "half_sent_file_kept",
        "a file that is on the storage is not compared with what is to be sent",
        "if path.name in there and objects.read(place) == content:",
        "if path.name in there:",
        "test_claims.py test_lost_replies.py test_shared.py",
    ),
)
REPORTS_STORE_UNSENT = of(
    "reports/store/unsent.py",
    (
        "edited_run_sealed_anew",
        "an unsent run.json that was edited gets a valid seal",
        "        check_seal(document, file)\n",
        "",
        "test_lost_replies.py test_claims.py test_seal.py test_attacks.py",
    ),
)
REPORTS_STORE_READER = of(
    "reports/store/reader.py",
    (
        "long_lists_not_counted",
        "a column of lists may hold any number of values",
        "if metadata.num_rows > ROWS or values > VALUES or unpacked > UNPACKED_BYTES:",
        "if metadata.num_rows > ROWS or unpacked > UNPACKED_BYTES:",
        "test_hostile_folders.py test_attacks.py",
    ),
)
REPORTS_STORE_INDEX = of(
    "reports/store/index.py",
    (
        "damaged_index_believed",
        "an index is believed whatever its digest",
        "        if hashlib.sha256(content).hexdigest().encode() != digest:\n"
        "            return {}, {}\n",
        "",
        "test_index.py test_attacks.py",
    ),
)
REPORTS_STORE_QUERY = of(
    "reports/store/query.py",
    (
        "folder_name_as_pattern",
        "the name of a folder is a pattern to DuckDB",
        "alone = [glob.escape(self.files[i]) for i",
        "alone = [self.files[i] for i",
        "test_history.py test_index.py test_store_commands.py",
    ),
)
REPORTS_REGISTRY_GATE_CHANGES = of(
    "reports/registry/gate_changes.py",
    (
        "planted_run_is_compared_with",
        "a run with a planted fault is what later ones are compared with",
        "        if not manifest.fault:\n",
        "        if there.size:\n",
        "test_gate_changes.py test_runs_page.py",
    ),
    (
        "lost_rows_not_counted",
        "a run counts as known although its failing rows are not those the index counted",
        "lost = {run for run in broken if len(failing[run]) != runs[run][0].broken}",
        "lost: set[int] = set()",
        "test_gate_changes.py test_runs_page.py",
    ),
    (
        "facts_followed_as_gates",
        "a row without a tolerance counts as a gate that held",
        "WHERE verdict <> 'info' AND {_KEY} IN (SELECT key FROM wanted)",
        "WHERE {_KEY} IN (SELECT key FROM wanted)",
        "test_gate_changes.py test_runs_page.py",
    ),
)
REPORTS_REGISTRY_LOOKBACK = of(
    "reports/registry/lookback.py",
    (
        "first_values_drawn",
        "the line of recent values has the oldest ones",
        "list(value ORDER BY created)[-24:]",
        "list(value ORDER BY created)[:24]",
        "test_index.py test_store_commands.py test_first_hour.py",
    ),
    (
        "unread_runs_counted",
        "runs that could not be read count as asked",
        "return Lookback(rows, len(runs) - len(broken), unreadable)",
        "return Lookback(rows, len(runs), unreadable)",
        "test_index.py test_store_commands.py test_hostile_folders.py",
    ),
)
REPORTS_REGISTRY_RETENTION = of(
    "reports/registry/retention.py",
    (
        "ports_share_their_newest",
        "runs of all ports and of Megalodon share one count of newest",
        "groups.setdefault((run.kind, run.manifest.subject, device), []).append(run)",
        "groups.setdefault((run.kind, device), []).append(run)",
        "test_store.py test_evidence.py test_hosts.py test_port_command.py",
    ),
)
REPORTS_REGISTRY_SHARED_INDEX = of(
    "reports/registry/shared_index.py",
    (
        "future_runs_never_kept",
        "a run dated ahead of the clock is read anew by every list",
        "return timedelta(0) <= age < JUDGED",
        "return age < JUDGED",
        "test_shared.py",
    ),
    (
        "deleted_runs_listed_from_there",
        "runs that were deleted come back from the index on the storage",
        "lines |= {name: line for name, line in _lines_there(storage).items() if name in names}",
        "lines |= _lines_there(storage)",
        "test_shared.py",
    ),
)
REPORTS_REGISTRY_SIDE_BY_SIDE = of(
    "reports/registry/side_by_side.py",
    (
        "equal_runs_suspected",
        "of equal runs of one commit something is suspected",
        "changed = bool(decision.changes) and not found.equal",
        "changed = bool(decision.changes)",
        "test_equal_nights.py test_compare_page.py",
    ),
)
REPORTS_NIGHTLY_EXPECTED = of(
    "reports/nightly/expected.py",
    (
        "seconds_of_any_processor",
        "parts of any processor say how long they take here",
        "for part in parts if part.processor == here}",
        "for part in parts}",
        "test_expected.py",
    ),
    (
        "oldest_night_expected",
        "the oldest nights say how long parts take",
        "sorted(run_folders(out), reverse=True)[:NEWEST]",
        "sorted(run_folders(out))[:NEWEST]",
        "test_expected.py",
    ),
)
REPORTS_NIGHTLY_FAN_OUT = of(
    "reports/nightly/fan_out.py",
    (
        "unlisted_parts_first",
        "parts without a rank begin with the longest one",
        "rank.get(item.name, len(rank))",
        "rank.get(item.name, 0)",
        "test_fan_out.py",
    ),
    (
        "any_night_of_that_second",
        "another night that began in the same second is taken for this one",
        "if _same_night(read_manifest(place.parent), merged.manifest):",
        "if read_manifest(place.parent).shards:",
        "test_fan_out.py",
    ),
    (
        "a_night_is_its_shards",
        "a night of the same second with other code, checkpoint or options is taken for this one",
        'names = ("shards", "code", "plan", "selected", "fault", "checkpoint", "contract")',
        'names = ("shards",)',
        "test_night_adversary.py",
    ),
    (
        "deaths_not_handed_on",
        "the run does not say that workers died of a part",
        "        attempts=answer.attempts,\n",
        "",
        "test_fan_out.py",
    ),
)
REPORTS_NIGHTLY_RUN = of(
    "reports/nightly/run.py",
    (
        "checkpoint_for_every_case",
        "a given checkpoint takes the place of every case",
        "replace(case, checkpoint=options.checkpoint, **fields) if case.checkpoint else case",
        "replace(case, checkpoint=options.checkpoint, **fields)",
        "test_nightly.py test_content.py test_shards.py",
    ),
)
REPORTS_NIGHTLY_SHARDS = of(
    "reports/nightly/shards.py",
    (
        "merged_host_is_the_first",
        "a night of several processors says it is of the first one",
        "return replace(all_of[0], device=device, host={}, threads=threads)",
        "return replace(all_of[0], device=device, threads=threads)",
        "test_shards.py test_hosts.py test_nightly.py",
    ),
)
REPORTS_NIGHTLY_PYTEST_SESSION = of(
    "reports/nightly/pytest_session.py",
    (
        "uncollected_not_planned",
        "a module that could not be collected is no part of the plan",
        "planned=len(planned) + len(self.uncollected),",
        "planned=len(planned),",
        "test_pytest_plugin.py",
    ),
)
PARITY_ENGINE_ALIGNMENT = of(
    "parity/engine/pairing/alignment.py",
    (
        "pinned_output_straightened",
        "the layout that a pin gives an output is thrown away",
        "if self.outputs[i, j] and x.shape == y.shape and self.by[i] is not AlignedBy.PIN:",
        "if self.outputs[i, j] and x.shape == y.shape:",
        "test_alignment.py test_what_was_compared.py",
    ),
    (
        "ambiguous_layout_is_usual",
        "of several layouts that equal pairs have one is taken for the rule",
        "for shapes, each in usual.items() if len(each) == 1}",
        "for shapes, each in usual.items() if each}",
        "test_alignment.py",
    ),
)
PARITY_ENGINE_CLOSENESS = of(
    "parity/engine/pairing/closeness.py",
    (
        "cancelling_sums_tell_apart",
        "sums that cancel must agree to their own size",
        "room = SLACK * equal * sizes[..., [0, 2, 2]]",
        "room = SLACK * equal * sizes",
        "test_alignment.py test_every_element.py",
    ),
)
PARITY_ENGINE_DEVIATION = of(
    "parity/engine/measure/deviation.py",
    (
        "tensors_kept_by_case",
        "all edges of a case share one allowance of described tensors",
        "        self.seen[m.case, m.edge] += 1\n        if self.seen[m.case, m.edge] > KEPT",
        '        self.seen[m.case, ""] += 1\n        if self.seen[m.case, ""] > KEPT',
        "test_deviation.py test_page_data.py",
    ),
)
PARITY_ENGINE_EXITS = of(
    "parity/engine/programs/exits.py",
    (
        "caught_exit_forgotten",
        "an os._exit that the code itself catches goes unnoticed",
        "        yield\n        if raised:\n            raise raised[0]\n",
        "        yield\n",
        "test_what_was_compared.py test_pytest_plugin.py test_port_command.py",
    ),
    (
        "fork_cannot_exit",
        "a process that was forked cannot end itself",
        "        if os.getpid() != owner:\n            before(status)\n",
        "",
        "test_what_was_compared.py test_pytest_plugin.py test_port_command.py",
    ),
)
PARITY_ENGINE_STAGE_NAMES = of(
    "parity/engine/pairing/stage_names.py",
    (
        "learned_across_layers",
        "pairs of other layers teach which names belong together",
        "        if n == m:\n            votes",
        "        if n is not None:\n            votes",
        "test_alignment.py",
    ),
)
PARITY_ENGINE_COMPARE = of(
    "parity/engine/measure/compare.py",
    (
        "identity_of_any_device",
        "measurements of other devices have one identity",
        "metric, METRICS_VERSION, self.device)",
        "metric, METRICS_VERSION)",
        "test_compare.py test_gpu_identity.py",
    ),
)
PARITY_PORT_COMPARE = of(
    "parity/port/compare.py",
    (
        "key_bias_is_lost",
        "a lacking bias whose derivative is rounding counts as lost",
        "if np.any(gradients.get(name, 0)) and _of_the_original(name) not in rounding",
        "if np.any(gradients.get(name, 0))",
        "test_what_was_compared.py test_cancelled_derivatives.py test_port_compare.py",
    ),
)
PARITY_PORT_HIDDEN = of(
    "parity/port/hidden.py",
    (
        "squares_of_the_last_seed",
        "the noise floor of elements is that of one seed, over their number",
        "                self.sums[name] += square",
        "                self.sums[name] = square",
        "test_hidden_elements.py test_port_compare.py",
    ),
    (
        "last_hidden_not_worst",
        "the last set of hidden elements is reported, not the worst",
        "        if worst is None or found.fraction > worst.fraction:\n",
        "        if found.count:\n",
        "test_hidden_elements.py",
    ),
)
PARITY_PORT_CONSEQUENCES = of(
    "parity/port/consequences.py",
    (
        "unaligned_forgotten",
        "stages without a partner are forgotten where a pair is taken apart",
        "unaligned_original=dict(alignment.unaligned_original) | originals",
        "unaligned_original=originals",
        "test_consequences.py test_port_compare.py",
    ),
)
PARITY_PORT_EXACT = of(
    "parity/port/exact.py",
    (
        "integers_of_one_width",
        "whole numbers of another width are a mismatch",
        "if (actual.dtype == bool) != (expected.dtype == bool):",
        "if actual.dtype != expected.dtype:",
        "test_what_was_compared.py test_port_compare.py",
    ),
    (
        "exact_result_of_the_port_alone",
        "whole numbers that only the port returns are found by the original's names",
        "for mine in port.keys() - set(partners.values()):",
        "for mine in port.keys() - partners.keys():",
        "test_what_was_compared.py",
    ),
)
PARITY_PORT_ROUNDING_FLOORS = of(
    "parity/port/rounding_floors.py",
    (
        "hidden_in_what_cancels",
        "elements of a quantity that is rounding are called hidden",
        "if squares is None or row is None or quantity in self.cancelled.get(edge, ()):",
        "if squares is None or row is None:",
        "test_rounding_floors.py test_cancelled_derivatives.py test_hidden_elements.py",
    ),
)
PARITY_EXECUTORS_ITEM = of(
    "parity/executors/item.py",
    (
        "answer_of_any_device",
        "the key of an answer leaves out the class of accelerator",
        "needs = self.needs.threads, sorted(self.needs.environment.items()), self.needs.device",
        "needs = self.needs.threads, sorted(self.needs.environment.items())",
        "test_executors.py test_item_inputs.py",
    ),
)
PARITY_EXECUTORS_LOCAL = of(
    "parity/executors/local.py",
    (
        "threads_of_the_first_item",
        "an item gets a process that counted other processors",
        "setting = item.needs.environment, item.needs.threads",
        "setting = item.needs.environment, None",
        "test_executors.py",
    ),
)
PARITY_EXECUTORS_SWEEP = of(
    "parity/executors/sweep.py",
    (
        "damaged_answer_not_replaced",
        "an answer that was damaged is measured again and never stored",
        "            del self._lines[key]\n",
        "",
        "test_executors.py test_item_inputs.py",
    ),
)
PARITY_EXECUTORS_SUPERVISION = of(
    "parity/executors/supervision.py",
    (
        "forks_record_too",
        "a fork of the command records that the command ended",
        "        if pid == os.getpid():\n",
        "        if pid:\n",
        "test_supervision.py",
    ),
)
PARITY_EXECUTORS_CLUSTER = of(
    "parity/executors/cluster.py",
    (
        "dead_worker_still_runs",
        "a worker that died is still at its item",
        "        if self.counts[item] > 1:\n",
        "        if self.counts[item] > ATTEMPTS:\n",
        "test_executors.py test_ray_executor.py",
    ),
)
PARITY_EXECUTORS_INTERRUPTS = of(
    "parity/executors/interrupts.py",
    (
        "only_leaders_end",
        "a worker that leads no group yet is not ended",
        "for kill in (os.killpg, os.kill):",
        "for kill in (os.killpg,):",
        "test_interrupts.py test_kills.py",
    ),
)
PARITY_EXECUTORS_PROGRESS = of(
    "parity/executors/progress.py",
    (
        "deaths_not_worth_a_line",
        "of a large sweep an item that killed a worker gets no line",
        "well = answer.state is State.DONE and answer.attempts == 1",
        "well = answer.state is State.DONE",
        "test_executors.py",
    ),
)

MUTANTS = (
    *REPORTS_VERDICT_AGREEMENT,
    *REPORTS_VERDICT_ANCHORS,
    *REPORTS_VERDICT_HISTORY,
    *REPORTS_VERDICT_PINS,
    *REPORTS_VERDICT_SINCE,
    *REPORTS_VERDICT_LEVELS,
    *REPORTS_VERDICT_DECIDE,
    *REPORTS_VERDICT_DRIFT,
    *REPORTS_STORE_CLAIMS,
    *REPORTS_STORE_EXAMINE,
    *REPORTS_STORE_GATHERED,
    *REPORTS_STORE_RUNS,
    *REPORTS_STORE_SENDING,
    *REPORTS_STORE_UNSENT,
    *REPORTS_STORE_READER,
    *REPORTS_STORE_INDEX,
    *REPORTS_STORE_QUERY,
    *REPORTS_REGISTRY_GATE_CHANGES,
    *REPORTS_REGISTRY_LOOKBACK,
    *REPORTS_REGISTRY_RETENTION,
    *REPORTS_REGISTRY_SHARED_INDEX,
    *REPORTS_REGISTRY_SIDE_BY_SIDE,
    *REPORTS_NIGHTLY_EXPECTED,
    *REPORTS_NIGHTLY_FAN_OUT,
    *REPORTS_NIGHTLY_RUN,
    *REPORTS_NIGHTLY_SHARDS,
    *REPORTS_NIGHTLY_PYTEST_SESSION,
    *PARITY_ENGINE_ALIGNMENT,
    *PARITY_ENGINE_CLOSENESS,
    *PARITY_ENGINE_DEVIATION,
    *PARITY_ENGINE_EXITS,
    *PARITY_ENGINE_STAGE_NAMES,
    *PARITY_ENGINE_COMPARE,
    *PARITY_PORT_COMPARE,
    *PARITY_PORT_HIDDEN,
    *PARITY_PORT_CONSEQUENCES,
    *PARITY_PORT_EXACT,
    *PARITY_PORT_ROUNDING_FLOORS,
    *PARITY_EXECUTORS_ITEM,
    *PARITY_EXECUTORS_LOCAL,
    *PARITY_EXECUTORS_SWEEP,
    *PARITY_EXECUTORS_SUPERVISION,
    *PARITY_EXECUTORS_CLUSTER,
    *PARITY_EXECUTORS_INTERRUPTS,
    *PARITY_EXECUTORS_PROGRESS,
)
