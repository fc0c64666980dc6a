"""The command `export-model`: writes and verifies a model folder for megalodon-hf."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.cli.console import (
    INCOMPLETE,
    OK,
    REGRESSED,
    examples,
    json_option,
    progress,
    quiet_option,
    unchecked,
)

# Everything heavy is imported inside the commands: help and usage errors must be instant.


@click.command(
    epilog=examples(
        "export-model parity/data/byte_lm deployed",
        "export-model parity/data/byte_lm deployed --dtype bfloat16 --max-shard-size 500MB",
        codes=True,
    )
)
@click.argument("checkpoint")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder whose tokenizer files are copied.",
)
@click.option(
    "--generation",
    type=click.Path(path_type=Path),
    help="Generation settings: a JSON file, or a folder with generation_config.json.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Storage dtype of all but the sensitive parameters.  [default: float32]",
)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Largest size of a weights file."
)
@click.option("--revision", help="Branch, tag or commit, if CHECKPOINT is an id of the Hub.")
@click.option("--no-verify", is_flag=True, help="Write the folder without verifying it.")
@json_option
@quiet_option
@click.pass_context
def export_model(
    ctx, checkpoint, folder, tokenizer, generation, dtype, max_shard_size, revision, no_verify,
    as_json, quiet,
) -> None:  # fmt: skip
    """Write FOLDER for megalodon-hf from CHECKPOINT: configuration, weights, tokenizer, settings.

    CHECKPOINT is anything that load_from_pretrained accepts: a file, a folder, an Orbax run folder
    or an id of the Hugging Face Hub. The folder is first read back bit by bit, loaded by
    megalodon-hf's from_pretrained, and run on both sides; logits must agree within the tolerance
    that nightly runs use for JAX against megalodon-hf. If that fails, nothing is written (exit code
    1). If megalodon-hf cannot run, the folder is written unverified, with exit code 3.
    """
    unchecked()
    from megalodon_jax.convert import load_from_pretrained
    from parity.checkpoint_pair.deployment import ExportError, export_pretrained

    report = progress(quiet)
    report(f"loading {checkpoint}")
    model = load_from_pretrained(checkpoint, revision=revision)
    code, answer = OK, {"folder": str(folder), "verified": False, "written": False}
    try:
        export = export_pretrained(
            model,
            folder,
            tokenizer=tokenizer,
            generation=generation,
            dtype=dtype,
            max_shard_size=max_shard_size,
            verify=not no_verify,
            report=report,
        )
    except ExportError as error:
        code, answer = REGRESSED, answer | {"reason": str(error), "record": None}
    else:
        code = OK if export.verified or no_verify else INCOMPLETE
        answer |= {"verified": export.verified, "written": True, "reason": export.reason}
        answer["record"] = export.record
    if as_json:
        click.echo(json.dumps(answer | {"exit_code": code}))
    else:
        state = "VERIFIED" if answer["verified"] else "NOT VERIFIED"
        click.echo(f"{state if answer['written'] else 'FAILED, nothing written'}: {folder}")
        click.echo(answer["reason"])
    ctx.exit(code)


COMMANDS = (export_model,)
