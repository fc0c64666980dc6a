"""Mutants of the page of two runs, of `--watch`, and of the program itself."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_FIRST_HOUR = "test_first_hour.py"
_COMPARE_PAGE = "test_compare_page.py"

SIDE_BY_SIDE = of(
    "reports/page/side_by_side.py",
    (
        "runs_change_sides",
        "the links of two runs lead to each other's pages",
        "zip(folders, (first, second), strict=True)",
        "zip(folders[::-1], (first, second), strict=True)",
        _COMPARE_PAGE,
    ),
    (
        "unmeasured_called_right",
        "gates that a run did not measure are reported as holding in it",
        '("pass", "nothing fails") if judged else ("info", "not measured")',
        '("pass", "nothing fails")',
        _COMPARE_PAGE,
    ),
    (
        "repaired_first",
        "what was repaired comes before what fails",
        "(*sides[1], *sides[0]))\n    return [",
        "(*sides[0], *sides[1]))\n    return [",
        _COMPARE_PAGE,
    ),
    (
        "repaired_in_the_map",
        "the map of an edge is of a case that was repaired",
        "in (*starts_of[1], *starts_of[0]):",
        "in (*starts_of[0], *starts_of[1]):",
        _COMPARE_PAGE,
    ),
    (
        "omitted_rows_unsaid",
        "rows that are left out are not counted",
        "max(0, len(cases) - CASES)",
        "0",
        _COMPARE_PAGE,
    ),
    (
        "equal_facts_marked",
        "facts of two runs that are the same are marked as different",
        "then != columns[1][name])",
        "then == columns[1][name])",
        _COMPARE_PAGE,
    ),
    (
        "second_run_counted_twice",
        "gates of the later run are shown as those of both",
        "for run, decision in ((before, then), (after, now))",
        "for run, decision in ((after, now), (after, now))",
        _COMPARE_PAGE,
    ),
)

WATCH = of(
    "reports/cli/watch.py",
    (
        "deleted_source_unseen",
        "a source file that is deleted is no change",
        "before.keys() | now.keys()",
        "now.keys()",
        _FIRST_HOUR,
    ),
    (
        "quick_edit_unseen",
        "an edit that keeps the size of a file is no change",
        "stamps[path] = state.st_mtime_ns, state.st_size",
        "stamps[path] = 0, state.st_size",
        _FIRST_HOUR,
    ),
    (
        "environments_watched",
        "an environment beside the source is watched, too",
        'if not f.startswith((".", "__pycache__"))',
        'if not f.startswith("__pycache__")',
        _FIRST_HOUR,
    ),
    (
        "their_modules_are_ours",
        "a module of the user's stands for ours",
        'sys.executable, "-P", "-m"',
        'sys.executable, "-m"',
        _FIRST_HOUR,
    ),
)

PROGRAM = of(
    "reports/cli/program.py",
    (
        "programs_of_all_machines_in_one_place",
        "machines that share a home share programs compiled for one of them",
        '" ".join(identity[n] for n in FIELDS)',
        '""',
        "test_program.py",
    ),
    (
        "programs_where_nobody_said",
        "compiled programs are stored elsewhere than JAX_COMPILATION_CACHE_DIR says",
        'if "JAX_COMPILATION_CACHE_DIR" in os.environ:',
        "if False:",
        "test_program.py",
    ),
)

MUTANTS = (*SIDE_BY_SIDE, *WATCH, *PROGRAM)
