"""Commands that compare a user's port (`port`), convert its parameters (`adopt`) and store one side
(`capture`)."""

from __future__ import annotations

from pathlib import Path

import click

from reports.cli.console import (
    FILE,
    INCOMPLETE,
    OK,
    REGRESSED,
    append,
    choice_option,
    examples,
    json_option,
    progress,
    quiet_option,
    runs_option,
    say,
    summary_option,
)
from reports.cli.watch import watch as run_again
from reports.cli.watch import watch_option, without_watch

# Everything heavy is imported inside the commands: help and usage errors must be instant.

ABOUT = """\
FILE is a Python file with a function `port()` that returns a parity.Port, or a list of them: two
sides, the original and its port. Nothing in either model is edited. See docs/your-own-port.md."""


@click.command(
    epilog=examples(
        "port docs/examples/my_port.py",
        "port docs/examples/my_port.py --case mlp --no-bfloat16",
        "port docs/examples/my_port.py --html port.html --json",
        "port docs/examples/my_port.py --watch",
        codes=True,
        about=ABOUT,
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--case", "cases", multiple=True, help="Compare only this port or case (repeatable).")
@click.option("--no-gradients", is_flag=True, help="Do not compare derivatives.")
@click.option("--no-bfloat16", is_flag=True, help="Do not run in bfloat16 as well.")
@click.option(
    "--pins", type=FILE, help="Use the stage pairs in this file, from --write-pins or corrected."
)
@click.option("--write-pins", type=FILE, help="Write the matched stage pairs to a file to correct.")
@click.option("--html", type=FILE, help="Also write the page to this file.")
@runs_option
@watch_option
@summary_option
@json_option
@quiet_option
@click.pass_context
def port(
    ctx,
    file,
    cases,
    no_gradients,
    no_bfloat16,
    pins,
    write_pins,
    html,
    out,
    watch,
    summary_md,
    as_json,
    quiet,
) -> None:
    """Compare a port with its original, store the run, write its page and print the verdict.

    Parameters and stages are paired by their values. The truth is what the two sides compute in
    float64, and every tolerance is derived from the rounding noise of both programs. If they
    differ, the report names the first stage that is wrong although its inputs are right. The run is
    compared only with earlier runs of the same port, never with a night.
    """
    if watch:
        if not file.is_file():
            raise click.UsageError(f"expected a Python file to watch, but {file} is not one.", ctx)
        ctx.exit(run_again(file.resolve().parent, without_watch()))
    report = progress(quiet)
    from reports.ports import Options, compare_ports, ports_of, select, store_ports
    from reports.store.runs import check_writable

    check_writable(out)
    options = Options(out, file, cases, not no_gradients, not no_bfloat16, pins)
    with ports_of(file) as ports:
        chosen = select(ports, options)
        if write_pins is not None and len(chosen) > 1:
            titles = ", ".join(each.title for each in chosen)
            raise click.UsageError(
                f"--write-pins writes the pairs of one port; select it with --case: {titles}"
            )
        done = compare_ports(chosen, report, report.step)
        outcome = store_ports(options, done, report)
    report.stop()
    assert outcome.decision is not None
    if write_pins is not None:
        from parity.pins import write

        write(done.found[0][1].alignment, write_pins)
    if html is not None:
        _copy(outcome.page, html)
    if summary_md is not None:
        from reports.cli.views.summary import markdown

        append(summary_md, markdown(outcome.run, outcome.decision))
    page = str(outcome.page.resolve())
    if as_json:
        say(ctx, outcome.decision, True, page=page, ports=_answers(outcome.run.manifest.ports))
    for document in outcome.run.manifest.ports:
        click.echo(f"{document['text']}\n")
    refusals = [f"{each.title}: not compared: {error}" for each, error in done.refused]
    say(ctx, outcome.decision, False, [*refusals, *outcome.against, page])


PLACE = ("culprit", "original", "last_right", "source", "mask")
"""Keys of a port's `place` (its first wrong stage) that --json prints."""


def _copy(page: Path, to: Path) -> None:
    from megalodon_jax.files import written_aside

    with written_aside(to) as aside:
        aside.write_bytes(page.read_bytes())


def _answers(documents) -> list[dict[str, object]]:
    """Return the part of each port's stored result that --json prints; run.json has all of it."""
    return [
        {
            **{name: d[name] for name in ("title", "holds", "sentence", "notices", "not_compared")},
            **{name: d["place"][name] for name in PLACE},
        }
        for d in documents
    ]


@click.command(
    epilog=examples(
        "capture docs/examples/my_port.py captured --side original",
        "capture docs/examples/my_port.py captured --side port --no-gradients --overwrite",
        about="""\
FILE is a Python file with a function `side()` that returns one side, or with the function `port()`
that `port FILE` asks for. In the other environment parity.CapturedSide(FOLDER) is that side.""",
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@choice_option("--side", ("original", "port"), "Side of the result of `port()`.")
@click.option("--case", default="", help="Port to capture, if `port()` returns several.")
@click.option("--loss", help="Output to differentiate; needed if the later comparison sets `loss`.")
@click.option("--no-gradients", is_flag=True, help="Capture no derivatives.")
@click.option("--no-bfloat16", is_flag=True, help="Do not run in bfloat16 too.")
@click.option("--no-parameters", is_flag=True, help="Write only hashes of the parameters.")
@click.option("--overwrite", is_flag=True, help="Replace an existing capture.")
def capture(
    file, folder, side, case, loss, no_gradients, no_bfloat16, no_parameters, overwrite
) -> None:
    """Write what one side of a port computes to FOLDER, for an environment that cannot run it.

    Writes parameters, inputs and stages of every run that a comparison needs, with versions and
    hashes; a comparison rejects a capture whose files were changed.
    """
    from parity.engine.programs.exits import exits_named
    from parity.sides import CapturedSide, comparison_runs
    from parity.sides import capture as write_capture
    from reports.ports import side_of

    with side_of(file, side, case) as (chosen, of), exits_named(f"the {chosen.kind} side"):
        runs = comparison_runs(
            chosen,
            valid=None if of is None else of.valid,
            loss=loss or (None if of is None else of.loss),
            gradients=not no_gradients and (of is None or of.gradients),
            bfloat16=not no_bfloat16 and (of is None or of.bfloat16),
        )
        write_capture(chosen, folder, runs=runs, parameters=not no_parameters, overwrite=overwrite)
    given = chosen.parameters() if no_parameters else None
    click.echo(CapturedSide(folder, parameters=given).text())
    click.echo(folder.resolve())


@click.command(
    epilog=examples(
        "adopt docs/examples/my_port.py",
        "adopt docs/examples/my_port.py --write convert.py --answers answers.json",
        codes=True,
        about=ABOUT,
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--case", default="", help="Port to convert for, if `port()` returns several.")
@click.option("--answers", type=FILE, help="Read answers from this file; write questions to it.")
@click.option("--write", type=FILE, help="Write the conversion to this file, a Python module.")
@click.pass_context
def adopt(ctx, file, case, answers, write) -> None:
    """Convert the original's parameters for its port, and test the conversion.

    Names and shapes propose the pairs of parameters. Both programs are then compared with the
    converted parameters; where they differ, other layouts, exchanges and orders are tried. What no
    comparison confirms is a question. Exits with 0 if nothing is left to do, with 1 if the programs
    differ, and with 3 if questions are open.
    """
    from megalodon_jax.files import written_aside
    from parity.engine.programs.exits import exits_named
    from parity.port import adopt as convert
    from reports.ports import port_of

    for path in filter(None, (answers, write)):
        if not path.absolute().parent.is_dir():
            raise click.UsageError(f"expected a folder {path.absolute().parent} for {path}.", ctx)
    if answers and write and answers.resolve() == write.resolve():
        raise click.UsageError(f"--answers and --write are one file, {write}; give two.", ctx)
    with port_of(file, case) as chosen, exits_named("a side"):
        found = convert(chosen, answers)
    click.echo(found.text())
    if write is not None:
        with written_aside(write) as aside:
            aside.write_text(found.source(), encoding="utf-8")
        click.echo(write.resolve())
    ctx.exit(OK if found.holds else INCOMPLETE if found.agrees else REGRESSED)


COMMANDS = (port, adopt, capture)
