"""Mutants that stand for a class of survivors each, among random edits of the syntax tree."""

from __future__ import annotations

from tools.mutant_list.mutant import of

PARITY_PORT_CONSEQUENCES = of(
    "parity/port/consequences.py",
    (
        "idle_pair_passes",
        "pairs that pass are taken for two quantities, and those that fail are not",
        "if pair.port not in failing:",
        "if pair.port in failing:",
        "test_consequences.py",
    ),
    (
        "compensated_by_itself",
        "a stage that is wrong fed the right inputs counts as one behind itself",
        "place.stages.index(culprit) + 1 :]",
        "place.stages.index(culprit) :]",
        "test_consequences.py",
    ),
)
PARITY_PORT_CORRESPONDENCE = of(
    "parity/port/correspondence.py",
    (
        "stages_that_were_not_computed",
        "a side that computes less than was aligned ends the comparison",
        "            for pair in self.alignment.pairs\n            if pair.original in original\n",
        "            for pair in self.alignment.pairs\n",
        "test_scripted_sides.py",
    ),
)
PARITY_PORT_ROUNDING_FLOORS = of(
    "parity/port/rounding_floors.py",
    (
        "squares_of_the_other_side",
        "elements of the port's float32 are held to the rounding of the original's",
        "PortEdge.PORT32_PORT64: operations[1:],",
        "PortEdge.PORT32_PORT64: operations[:1],",
        "test_scripted_sides.py test_hidden_elements.py",
    ),
    (
        "terms_of_one_side_twice",
        "what cancels on an edge of one side is relative to its terms counted twice",
        "own = own[:1] if left is right else [each for each in own if each]",
        "own = [each for each in own if each]",
        "test_scripted_sides.py test_cancelled_derivatives.py",
    ),
)
PARITY_PORT_LOCALISATION = of(
    "parity/port/localisation.py",
    (
        "place_without_tables_of_the_original",
        "tables in float32 of the original are no room of a stage that is fed its values",
        "floors = together(tables, narrowed(operations), constants)",
        "floors = together(tables, narrowed(operations))",
        "test_scripted_sides.py test_tables_and_masks.py",
    ),
)
PARITY_PORT_NARROW = of(
    "parity/port/narrow.py",
    (
        "narrow_error_over_the_narrow",
        "the original's error in bfloat16 is relative to its bfloat16",
        "relative_l2(_wide(narrow[name]), exact[name])",
        "relative_l2(exact[name], _wide(narrow[name]))",
        "test_scripted_sides.py test_nan_under_rounding.py",
    ),
)
PARITY_ENGINE_ALIGNMENT = of(
    "parity/engine/pairing/alignment.py",
    (
        "digits_outweigh_names",
        "one decimal digit that agrees counts as much as sixteen",
        "np.where(telling, digits / 4, 0.0)",
        "np.where(telling, digits * 4, 0.0)",
        "test_metrics_by_hand.py test_alignment.py",
    ),
)
PARITY_ENGINE_CLOSENESS = of(
    "parity/engine/pairing/closeness.py",
    (
        "mask_of_the_size_named",
        "a mask of exactly the size from which on numbers are masks is one",
        "scale = _norm(e[np.abs(e) < MASKED])",
        "scale = _norm(e[np.abs(e) <= MASKED])",
        "test_metrics_by_hand.py test_alignment.py",
    ),
)
PARITY_ENGINE_CONSTANTS = of(
    "parity/engine/measure/constants.py",
    (
        "constant_on_one_side",
        "what is constant on one side alone is no gate",
        "if is_constant(one[name]) and is_constant(other[name])",
        "if is_constant(one[name]) or is_constant(other[name])",
        "test_metrics_by_hand.py test_what_was_compared.py",
    ),
)
PARITY_ENGINE_CONTRACT = of(
    "parity/engine/measure/contract.py",
    (
        "lost_gates_are_one",
        "the sentence says of each line that one gate at most is missing",
        "lost = sum(max(line.gates - found, 1) for line, found in self.missing)",
        "lost = sum(min(line.gates - found, 1) for line, found in self.missing)",
        "test_metrics_by_hand.py test_contract.py",
    ),
)
PARITY_ENGINE_CONVENTIONS = of(
    "parity/engine/pairing/conventions.py",
    (
        "vector_is_near_nothing",
        "a vector is no merged matrix of its size",
        "or min(map(len, wide)) == 1 else",
        "or min(map(len, wide)) == 0 else",
        "test_metrics_by_hand.py test_proposal.py",
    ),
)
PARITY_ENGINE_IRREGULARITIES = of(
    "parity/engine/pairing/irregularities.py",
    (
        "row_lies_in_two_ways",
        "a matrix whose one side is 1 is odd where its neighbours are transposed",
        "sum(n > 1 for n in pair.construction.shape) > 1",
        "sum(n > 1 for n in pair.construction.shape) >= 1",
        "test_irregularities.py",
    ),
)
REPORTS_VERDICT_DECIDE = of(
    "reports/verdict/decide.py",
    (
        "new_by_its_case_alone",
        "an edge that failed before is new because another of its case is",
        "is_new = any(case == m.case and edge == m.edge for case, edge, _, _ in new)",
        "is_new = any(case == m.case for case, edge, _, _ in new)",
        "test_rules_by_hand.py test_verdicts.py",
    ),
)
REPORTS_VERDICT_LEVELS = of(
    "reports/verdict/levels.py",
    (
        "recent_and_one_more",
        "a level is of one value more than the newest that it should be of",
        "settle((*earlier[1 - RECENT :], m.value))",
        "settle((*earlier[-RECENT:], m.value))",
        "test_rules_by_hand.py test_hosts.py",
    ),
)
REPORTS_VERDICT_NOISE = of(
    "reports/verdict/noise.py",
    (
        "step_below_the_largest",
        "a value below all that was seen is a step only where it is far beyond the largest",
        "or now < min(logs) - floor",
        "or now < min(logs) - 2 * floor",
        "test_rules_by_hand.py test_rates.py",
    ),
)
REPORTS_VERDICT_SEVERAL = of(
    "reports/verdict/several.py",
    (
        "other_work_than_the_run_before",
        "a cell is compared with the newest run that has it in place of the first",
        "identity = m.identity if identity is None else identity",
        "identity = identity if identity is None else m.identity",
        "test_rules_by_hand.py test_compare_several.py",
    ),
)
PARITY_PROMISES = (
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
        "parity/engine/pairing/resemblance.py",
        (
            "line_through_what_is_not_finite",
            "a straight line is looked for where one of two arrays holds an infinity",
            "not (np.isfinite(x).all() and np.isfinite(y).all())",
            "not (np.isfinite(x).all() or np.isfinite(y).all())",
            "test_comparisons_by_model.py",
        ),
    ),
    *of(
        "parity/engine/pairing/stage_names.py",
        (
            "field_is_a_fifth_of_a_word",
            "an index at the end of a name counts twice as much as it should",
            "FIELD_WEIGHT = 0.1",
            "FIELD_WEIGHT = 0.2",
            "test_names_by_model.py",
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
        "parity/engine/measure/deviation.py",
        (
            "bits_of_another_machine_as_here",
            "on a machine of the other byte order bits are counted from the wrong end",
            "else stored.tobytes()[::-1]",
            "else stored.tobytes()",
            "test_comparisons_by_model.py",
        ),
    ),
    *of(
        "parity/port/report.py",
        (
            "hint_hides_another",
            "a matrix that is not transposed and irregular as well is reported as irregular only",
            "notes.setdefault(name, []).append(note)",
            "notes[name] = [note]",
            "test_scripted_reports.py",
        ),
    ),
    *of(
        "parity/port/ledger.py",
        (
            "gate_without_a_bound_compares",
            "a result that failed for want of a tolerance counts as compared",
            "in (Verdict.PASS, Verdict.FAIL) and math.isfinite(row.tolerance)",
            "in (Verdict.PASS, Verdict.FAIL)",
            "test_scripted_reports.py",
        ),
    ),
    *of(
        "parity/executors/pace.py",
        (
            "late_items_are_on_time",
            "an item that takes longer than expected does not change the pace",
            "if age / expected <= taken / wanted:",
            "if age / expected >= taken / wanted:",
            "test_executors_by_hand.py",
        ),
    ),
    *of(
        "parity/executors/cluster.py",
        (
            "dead_nodes_count",
            "a node that has left the cluster is one that can hold an item",
            ' for node in self.ray.nodes() if node["Alive"]]',
            " for node in self.ray.nodes()]",
            "test_executors_by_hand.py",
        ),
    ),
)
MUTANTS = (
    *(*PARITY_PORT_CONSEQUENCES, *PARITY_PORT_CORRESPONDENCE, *PARITY_PORT_ROUNDING_FLOORS),
    *(*PARITY_PORT_LOCALISATION, *PARITY_PORT_NARROW),
    *(*PARITY_ENGINE_ALIGNMENT, *PARITY_ENGINE_CLOSENESS, *PARITY_ENGINE_CONSTANTS),
    *(*PARITY_ENGINE_CONTRACT, *PARITY_ENGINE_CONVENTIONS, *PARITY_ENGINE_IRREGULARITIES),
    *(*REPORTS_VERDICT_DECIDE, *REPORTS_VERDICT_LEVELS, *REPORTS_VERDICT_NOISE),
    *REPORTS_VERDICT_SEVERAL,
    *PARITY_PROMISES,
)
# Found among random edits of what judges, stores and merges nights; the models of the tests named
# here tell each from the rules.
REPORTS_BY_MODEL = (
    *of(
        "reports/verdict/anchors.py",
        (
            "anchor_of_other_gates",
            "a night that measured one gate more than a level has is its anchor, and unjudged",
            "held = holders[_work(info)] = {turn for turn in held if wanted[turn] in theirs}",
            "held = holders[_work(info)] = {turn for turn in held if theirs}",
            "test_hosts.py test_stored_histories.py",
        ),
        (
            "anchor_hides_a_later_level",
            "a level of other work of an older anchor stands in place of the one that compares",
            "if todays.get(g, it.work) == it.work}",
            "if todays.get(g, it.work)}",
            "test_hosts.py test_stored_histories.py",
        ),
    ),
    *of(
        "reports/verdict/levels.py",
        (
            "level_of_an_infinite_tolerance",
            "a gate that is not comparable has a level, and it is infinite",
            "gated = 0 < DRIFT_SHARE * m.tolerance < math.inf and",
            "gated = 0 < DRIFT_SHARE * m.tolerance and",
            "test_verdicts_by_model.py",
        ),
    ),
    *of(
        "reports/verdict/drift.py",
        (
            "unseen_though_held",
            "a level that an earlier run of this machine holds is not comparable all the same",
            "drift.ratio > UNSEEN and drift.group not in self.held | left:",
            "drift.ratio > UNSEEN and drift.group not in left:",
            "test_verdicts_by_model.py test_first_night.py",
        ),
    ),
    *of(
        "reports/verdict/sentences.py",
        (
            "shared_is_suspected_of_an_edge_that_was_not_measured",
            "what both share is suspected where JAX and the oracle were never compared",
            "not ours <= measured - broken",
            "ours & broken",
            "test_sentences.py",
        ),
    ),
    *of(
        "reports/nightly/pytest_session.py",
        (
            "failed_before_it_recorded",
            "a test that failed before it recorded anything was not executed",
            "executed = self.called & (recorded | self.failed)",
            "executed = self.called & recorded",
            "test_sessions.py",
        ),
        (
            "status_of_pytest_is_the_verdict_s",
            "a session that is not judged by its verdict ends with it",
            "if verdict and self.judged:",
            "if verdict:",
            "test_sessions.py",
        ),
    ),
    *of(
        "reports/nightly/accounts.py",
        (
            "account_of_a_carried_error",
            "the account of a port has the error that was carried to its culprit",
            "culprit.forced,",
            "culprit.free,",
            "test_parts_of_a_night.py",
        ),
    ),
    *of(
        "reports/nightly/shards.py",
        (
            "missing_shard_by_its_first_part",
            "a shard that is missing leaves the suite of its first part alone not whole",
            "for part in Shard.parse(text).part_of(plan):",
            "for part in Shard.parse(text).part_of(plan)[:1]:",
            "test_parts_of_a_night.py test_shards.py",
        ),
    ),
    *of(
        "reports/store/manifest.py",
        (
            "times_as_documents",
            "the seconds of comparisons are read as documents, not as times",
            'tuple(Time(**_fields_of(Time, row)) for row in _list(parts, "times"))',
            '_list(parts, "times")',
            "test_documents.py test_shards.py",
        ),
    ),
)
MUTANTS = (*MUTANTS, *REPORTS_BY_MODEL)
# Planted in the code of untransposed kernels, of packed documents differentiated forwards, dropped
# on a mesh and probed, and of runs that several processes read.
READ_AGAIN = (
    *of(
        "parity/port/untransposed.py",
        (
            "untransposed_whatever_follows",
            "a matrix is named as not transposed although the stage fails with it transposed",
            "found = [name for name in tried if holds([name])]",
            "found = [*tried]",
            "test_untransposed.py",
        ),
        (
            "untransposed_one_by_one_only",
            "two kernels of one stage that are both not transposed are not named",
            "if not found and len(tried) > 1 and holds(tried):",
            "if not found and len(tried) > 9 and holds(tried):",
            "test_untransposed.py",
        ),
        (
            "untransposed_by_module_only",
            "a kernel of a function without modules is not tried",
            "tried = [*own, *(name for name in square if first_use(name, stages) < 0)][:TRIED]",
            "tried = own[:TRIED]",
            "test_untransposed.py",
        ),
    ),
    *of(
        "megalodon_jax/layers/packed_attention.py",
        (
            "dropout_by_place_in_the_stripe",
            "every stripe of packed attention drops the same weights",
            "draws._replace(first=draws.first + begin)",
            "draws._replace(first=draws.first)",
            "test_packed.py",
        ),
        (
            "dropout_without_the_key_s_place",
            "all weights of a query are kept or dropped together",
            "draws.first + queries), draws.first + keys)",
            "draws.first + queries), 0 * keys)",
            "test_packed.py::test_dropout_of_documents_is_drawn_by_place",
        ),
    ),
    *of(
        "megalodon_jax/layers/attention.py",
        (
            "dropout_of_one_head",
            "all heads of a row drop the same weights",
            "numbers = jnp.arange(rows * heads, dtype=jnp.int32)",
            "numbers = jnp.arange(rows * heads, dtype=jnp.int32) // heads",
            "test_packed.py",
        ),
        (
            "left_over_values_are_weighted",
            "what an earlier document left in the ring enters the sum of values with weight 0",
            "(v,) = _silenced(seen[:, 0], v)",
            "pass",
            "test_packed.py::test_what_is_left_of_an_earlier_document_may_be_no_number",
        ),
        (
            "left_over_values_of_a_block",
            "the same for a piece without segment ids",
            "earlier = _silenced(held >= 0, ring.v) if ring.per_row else (ring.v,)",
            "earlier = (ring.v,)",
            "test_packed.py::test_what_is_left_of_an_earlier_document_may_be_no_number",
        ),
        (
            "left_over_values_of_a_piece",
            "the same for a piece with segment ids",
            "    (v,) = _silenced(there, v)\n",
            "",
            "test_packed.py::test_what_is_left_of_an_earlier_document_may_be_no_number",
        ),
    ),
    *of(
        "megalodon_jax/sharding/placement.py",
        (
            "padding_is_a_document",
            "a padded batch fills segment ids with 0, which begins a document",
            '"attention_mask": 0, "segment_ids": None}',
            '"attention_mask": 0, "segment_ids": 0}',
            "test_sharded_parameters.py",
        ),
    ),
    *of(
        "stability/activations/attention.py",
        (
            "heads_forget_the_chunk_before",
            "a probed query of a packed document sees no key of the row's chunk before its own",
            "if positions is not None:\n        # A chunk of a document",
            "if False:\n        # A chunk of a document",
            "tests/stability/activations/test_activations.py",
        ),
    ),
    *of(
        "stability/moe/training.py",
        (
            "unguarded_run_ends_by_its_loss_alone",
            "a run without a guard goes on after a gradient that is not finite",
            "in (Verdict.SKIPPED_LOSS, Verdict.SKIPPED_GRADIENT):",
            "in (Verdict.SKIPPED_LOSS,):",
            "tests/stability/moe/test_training.py",
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
        (
            "helper_in_the_caller_s_folder",
            "a helper imports a package `reports` of the folder that the caller is in",
            '"PYTHONSAFEPATH": "1", ',
            "",
            "test_several.py",
        ),
    ),
    *of(
        "reports/store/examine.py",
        (
            "unchecked_columns_are_skipped",
            "of a run without checksums only the columns that decide are read",
            "read = None if checksums is None else _COLUMNS",
            "read = _COLUMNS",
            "test_store.py test_documents.py test_hostile_folders.py test_attacks.py",
        ),
    ),
    *of(
        "reports/__init__.py",
        (
            "extra_is_named_one_by_one",
            "only the first missing package of the extra is named",
            "missing = [name for name in NIGHTLY if importlib.util.find_spec(name) is None]",
            "missing = [name for name in NIGHTLY[:1] if importlib.util.find_spec(name) is None]",
            "test_bare_install.py",
        ),
    ),
)
MUTANTS = (*MUTANTS, *READ_AGAIN)
# Planted blind a fourth and a fifth time: one survivor of each class.
BLIND_AGAIN = (
    *of(
        "reports/store/sending.py",
        (
            "lost_claim_leaves_run_json",
            "run.json that was sent before the name was taken away stays there",
            "    elif not _has_manifest(objects, folder, name):\n        return False\n",
            "    else:\n        return False\n",
            "test_claims.py",
        ),
    ),
    *of(
        "reports/store/query.py",
        (
            "gates_of_a_namesake_elsewhere",
            "a run that was gathered again has the gates of its older file too",
            "JOIN places ON filename = together AND rows.run = folder",
            "JOIN places ON rows.run = folder",
            "test_index.py",
        ),
    ),
)
MUTANTS = (*MUTANTS, *BLIND_AGAIN)
