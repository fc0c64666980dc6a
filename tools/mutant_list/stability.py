"""Mutants of `stability`: one for each module with logic that can be wrong."""

from __future__ import annotations

from tools.mutant_list.mutant import of

MUTANTS = (
    *of(
        "stability/repeat/digests.py",
        (
            "digest_without_places",
            "elements that change places have the same digest",
            "index = index + counted * jnp.uint32(stride % 2**32)",
            "index = index",
            "test_repeat.py",
        ),
    ),
    *of(
        "stability/repeat/log.py",
        (
            "computed_twice_unseen",
            "of a step that was computed twice the last one counts",
            "            repeated[step] = None\n",
            "            pass\n",
            "test_repeat.py",
        ),
    ),
    *of(
        "stability/storage/simulate.py",
        (
            "moments_not_filled",
            "steps are counted from moments of zero, where AdamW moves everything once",
            "state = jax.lax.fori_loop(1, burn_in + 1, fill, state)",
            "state = state",
            "test_simulate.py::test_moments_have_settled_when_counting_begins",
        ),
    ),
    *of(
        "stability/dtype_audit/policy.py",
        (
            "accumulators_by_their_inputs",
            "an accumulator is narrow where an input is",
            "return [row for row in inside if row.output and is_narrow(row.output)]",
            "return [row for row in inside if any(map(is_narrow, row.inputs))]",
            "test_dtype_policy.py test_dtype_audit.py::test_the_model_keeps_the_policy",
        ),
    ),
    *of(
        "stability/products/accuracy.py",
        (
            "draws_beyond_neighbours",
            "a draw two steps away is right",
            "np.all(np.abs(errors) < step)",
            "np.all(np.abs(errors) < 3 * step)",
            "test_products.py::test_one_draw_two_steps_away_is_no_draw",
        ),
    ),
    *of(
        "stability/recovery/guard.py",
        (
            "clipped_norm_enters_the_window",
            "a norm that was clipped raises its own limit",
            "norms=_pushed(state.norms, report.norm, report.verdict == Verdict.ACCEPTED)",
            "norms=_pushed(state.norms, report.norm, keep)",
            "test_guard.py",
        ),
    ),
    *of(
        "stability/storage/survival.py",
        (
            "gap_below_the_smallest_normal",
            "below the smallest normal number the gap is half of what it is",
            "(mantissa == 0.5) & (exponent - 1 > fmt.min_exponent)",
            "(mantissa == 0.5) & (exponent - 1 >= fmt.min_exponent)",
            "test_survival.py test_shares.py",
        ),
    ),
    *of(
        "stability/storage/torch_narrow.py",
        (
            "carry_not_added",
            "what rounding kept from a parameter is stored and never added",
            "p.data += optimizer.state[p][CARRY].float()",
            "p.data += 0 * optimizer.state[p][CARRY].float()",
            "test_torch_narrow.py::test_kahan_is_right_for_each_element",
        ),
    ),
    *of(
        "stability/storage/torch_state.py",
        (
            "rate_of_now",
            "the rate is where a schedule has taken it, not where it began",
            'rate = _number(group.get("initial_lr", group.get("lr")))',
            'rate = _number(group.get("lr"))',
            "test_whole_run.py::test_a_schedule_is_taken_from_where_it_began",
        ),
    ),
    *of(
        "stability/storage/whole_run.py",
        (
            "families_not_weighed",
            "every leaf counts alike, however far it was to go",
            "self.push[n] = float(np.mean(way, dtype=np.float64)) * self.leaves[n].size",
            "self.push[n] = 1.0",
            ""
            "test_whole_run.py::test_the_size_of_gradients_decides_and_not_the_fidelity_of_a_leaf "
            "test_whole_run.py",
        ),
    ),
)
