"""Mutants of what runs on executors: stored answers, shared nights, lists of shared runs."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_EXECUTORS, _FAN_OUT, _SHARED = "test_executors.py", "test_fan_out.py", "test_shared.py"

ANSWERS = of(
    "parity/executors/sweep.py",
    (
        "half_an_answer_kept",
        "the next answer is written behind half of one, and neither can be read",
        "        os.truncate(path, len(whole))",
        "        pass",
        f"{_EXECUTORS}::test_an_answer_that_a_driver_was_killed_in_is_none",
    ),
    (
        "answer_changed",
        "an answer that is stored is replaced by a later one",
        "        if key in self._lines:",
        "        if False:",
        f"{_EXECUTORS}::test_an_answer_that_a_driver_was_killed_in_is_none",
    ),
    (
        "answers_survive_their_run",
        "answers that became a run are taken for the next night's",
        "        self._file.truncate(0)",
        "        pass",
        f"{_EXECUTORS}::test_an_answer_that_a_driver_was_killed_in_is_none",
    ),
    (
        "drivers_share_a_folder",
        "two drivers write into one file of answers",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        f"{_EXECUTORS}::test_two_drivers_do_not_share_a_folder",
    ),
    (
        "half_a_folder_stands",
        "what a killed driver had written of an item's files stays among the new ones",
        "with self.disk.folder_written_aside(self.folder / key) as aside:",
        "with nullcontext(self.folder / key) as aside:",
        f"{_EXECUTORS}::test_files_of_an_item_whose_answer_was_not_stored_are_replaced",
    ),
)
NIGHTS = of(
    "reports/nightly/fan_out.py",
    (
        "broken_checkpoint_begun",
        "a shared night begins with a checkpoint that cannot be read",
        "    if options.checkpoint is not None:",
        "    if False:",
        f"{_FAN_OUT}::test_a_checkpoint_that_is_not_there_is_refused_before_any_part_begins",
    ),
    (
        "longest_parts_last",
        "the longest part begins last and holds up the night",
        "key=lambda item: rank.get(item.name, len(rank))",
        "key=lambda item: -rank.get(item.name, len(rank))",
        f"{_FAN_OUT}::test_what_takes_longest_begins_first",
    ),
    (
        "any_device_will_do",
        "a part that is for a GPU is measured on the processor",
        "    if device and device_kind() != device:",
        "    if False:",
        f"{_FAN_OUT}::test_a_night_for_a_device_that_is_not_there_is_no_run",
    ),
)
LISTS = of(
    "reports/registry/shared_index.py",
    (
        "deleted_runs_listed",
        "a run that was deleted from the storage stays in the list",
        "for name, line in known.items() if name in names}",
        "for name, line in known.items()}",
        f"{_SHARED}::test_a_list_copies_no_run_and_reads_what_nobody_has_listed",
    ),
    (
        "list_kept_to_itself",
        "what one machine has read every other reads again",
        "            storage.put(here, THERE)",
        "            pass",
        f"{_SHARED}::test_a_list_copies_no_run_and_reads_what_nobody_has_listed",
    ),
    (
        "list_of_others_unread",
        "what another machine has listed is read from the runs again",
        "    if names - lines.keys():",
        "    if False:",
        f"{_SHARED}::test_a_list_copies_no_run_and_reads_what_nobody_has_listed",
    ),
    (
        "readers_have_no_list",
        "who may not write to the storage cannot list it",
        "with suppress(StoreError, OSError):",
        "with suppress(OSError):",
        f"{_SHARED}::test_who_may_only_read_has_a_list_and_reads_nothing_twice",
    ),
)

MUTANTS = (*ANSWERS, *NIGHTS, *LISTS)
