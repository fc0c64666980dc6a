"""Mutants of the bench and of what a page says of its history."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_CHANGES, _SIDES = "test_change_points.py", "test_bench_sides.py"

CHANGE_POINTS = of(
    "reports/verdict/change_points.py",
    (
        "level_of_one_run",
        "one outlier is a level",
        "SHORTEST = 3",
        "SHORTEST = 1",
        _CHANGES,
    ),
    (
        "noise_changes_level",
        "half of what noise does counts as a change",
        "if reached > allowed:",
        "if reached > 50 * allowed:",
        _CHANGES,
    ),
    (
        "change_among_the_measured",
        "a change is counted among the runs with a value, not among all",
        "ChangePoint(places[start], before, after)",
        "ChangePoint(start, before, after)",
        _CHANGES,
    ),
)
BENCH = (
    *of(
        "reports/store/timings.py",
        (
            "most_as_least",
            "a goal of at most is one of at least",
            "if self.metric in AT_MOST else",
            "if False else",
            _SIDES,
        ),
    ),
    *of(
        "reports/bench/figures.py",
        (
            "length_not_divided_out",
            "a longer sequence may take no longer",
            "scale = shortest / n",
            "scale = 1.0",
            _SIDES,
        ),
        (
            "machines_share_a_bench",
            "machines of one name have one history",
            "host = sorted(environment.host.items())",
            "host = []",
            "test_bench.py",
        ),
    ),
    *of(
        "reports/bench/workloads.py",
        (
            "floor_in_fresh_memory",
            "the floor of the products touches fresh memory for every result",
            "jax.jit(products, donate_argnums=2, keep_unused=True)",
            "jax.jit(products, keep_unused=True)",
            "test_bench.py",
        ),
    ),
    *of(
        "reports/bench/run.py",
        (
            "bench_with_checks",
            "our programs are timed with checks on values, which megalodon-hf has none of",
            "traced_checks(False)",
            "traced_checks(True)",
            "test_bench.py",
        ),
    ),
    *of(
        "reports/bench/variants.py",
        (
            "rows_not_counted",
            "the tokens of one row are those of all",
            "speed = count * tokens / median(ours)",
            "speed = tokens / median(ours)",
            _SIDES,
        ),
        (
            "other_side_is_wide",
            "our bfloat16 is timed against float32 of the other package",
            "_other_side(stack, other, narrow, length)",
            "_other_side(stack, other, config, length)",
            _SIDES,
        ),
    ),
    *of(
        "reports/bench/lengths.py",
        (
            "other_side_saves_no_memory",
            "the other package keeps logits of the whole sequence, ours of a chunk",
            "start_other(place, config, length, **loss)",
            "start_other(place, config, length)",
            _SIDES,
        ),
    ),
    *of(
        "reports/bench/worker.py",
        (
            "prints_answer",
            "what a library prints is taken for an answer",
            "os.dup2(2, 1)",
            "os.dup2(1, 1)",
            _SIDES,
        ),
    ),
    *of(
        "reports/page/sections/speed.py",
        (
            "slower_called_better",
            "a larger quotient is better, whatever it is of",
            "!= (timing.metric in LESS_IS_BETTER)",
            "!= False",
            "test_speed_history.py",
        ),
    ),
)

MUTANTS = (*CHANGE_POINTS, *BENCH)
