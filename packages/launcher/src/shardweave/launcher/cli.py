"""The `shardweave` command.

This module imports next to nothing. `train` starts the process that forks the ranks (see `processes`) before it
reads its configuration: that process needs seconds to import torch, and this one has work to do meanwhile.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shardweave.launcher._version import __version__
from shardweave.launcher.data_command import data
from shardweave.launcher.exit_status import INTERRUPTED, USAGE_ERROR
from shardweave.launcher.request import Nodes, Request
from shardweave.launcher.schedule_command import schedule

__all__ = ["main"]

_PORT = click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port where local ranks meet; 0: a free one."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardweave")
def cli() -> None:
    """Trains transformers over many devices: data, tensor and pipeline parallel, with sharded optimizers.

    \b
    Example:
      shardweave train parallel.tensor=2 parallel.pipeline=2 run.steps=20
    """


@cli.command()
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE ...]")
@click.option(
    "--dry-run", is_flag=True, help="Check everything and print layout, memory and batch; start nothing."
)
@click.option("--print-config", is_flag=True, help="Print the resolved YAML and start nothing.")
@_PORT
@click.option("--nnodes", metavar="MIN:MAX", help="Of how many machines this is one; they may come and go.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where machines meet: on the first of them.")
@click.option(
    "--nproc-per-node", type=click.IntRange(min=1), help="Ranks on this machine; default: one a device."
)
@click.option("--rdzv-id", metavar="ID", help="Name of the job over several machines; default: the run's.")
@click.option(
    "--rdzv-timeout",
    type=click.FloatRange(min=1),
    default=600,
    show_default=True,
    help="Seconds to wait for machines.",
)
def train(
    arguments: tuple[str, ...],
    dry_run: bool,
    print_config: bool,
    port: int,
    nnodes: str | None,
    rdzv_endpoint: str | None,
    nproc_per_node: int | None,
    rdzv_id: str | None,
    rdzv_timeout: float,
) -> None:
    """Trains the run that the YAML file CONFIG describes, with KEY=VALUE overrides.

    Without CONFIG the defaults apply. Starts as many local ranks as the layout needs; under torchrun or srun (RANK
    and WORLD_SIZE in the environment) this process joins as one of the ranks. With --nnodes the same command on several
    machines is one job, which goes on with those that are there.

    \b
    Example:
      shardweave train run.yaml parallel.tensor=2 optimizer.lr=3e-4
      shardweave train run.yaml --nnodes 2:4 --rdzv-endpoint node0:29400
      torchrun --nproc-per-node 8 -m shardweave.launcher train run.yaml
    """
    request = Request.of(arguments, port=port)
    if print_config or dry_run:
        from shardweave.launcher import describe

        sys.exit(describe.print_config(request) if print_config else describe.dry_run(request))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardweave.launcher.join import train_joined

        train_joined(request)
    if nnodes is not None:
        from shardweave.launcher.several import train_on_nodes

        sys.exit(
            train_on_nodes(request, _nodes(nnodes, rdzv_endpoint, nproc_per_node, rdzv_id, rdzv_timeout))
        )
    if rdzv_endpoint or nproc_per_node or rdzv_id:
        raise click.UsageError(
            "--rdzv-endpoint, --nproc-per-node and --rdzv-id need --nnodes, such as --nnodes 2:4"
        )
    from shardweave.launcher.local import train_local

    sys.exit(train_local(request))


@cli.command()
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE ...]")
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many to compare."
)
@click.option(
    "--precision",
    type=click.Choice(["fp64", "configured"]),
    default="fp64",
    show_default=True,
    help="Compute in float64, where rounding hides nothing, or in the configuration's own precision.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
@_PORT
def verify(arguments: tuple[str, ...], steps: int, precision: str, as_json: bool, port: int) -> None:
    """Proves that the layout of CONFIG is the same training run as one process, or says where they part.

    Trains both on the same data for a few steps and compares hidden states, losses, gradients, norms and parameters
    on every rank. A large model is made small first, with the same structure and divisibility. Writes nothing.
    Exit status: 0 when they are equal, 4 when they part.

    \b
    Example:
      shardweave verify run.yaml
      shardweave verify model.preset=llama-3-8b parallel.tensor=4 parallel.pipeline=2
    """
    from shardweave.launcher.verify.options import Options

    request = Request.of(arguments, port=port)
    options = Options(steps=steps, float64=precision == "fp64", as_json=as_json)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shardweave.launcher.verify.joined import verify_joined

        verify_joined(request, options)
    from shardweave.launcher.verify.local import verify_local

    sys.exit(verify_local(request, options))


_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
_RUN = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
_OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")


@cli.command()
@_RUN
@_OVERRIDES
@click.option(
    "--prompt", "prompts", multiple=True, required=True, help="The text to continue; may be repeated."
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="How many to sample, at most.",
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: the likeliest."
)
@click.option(
    "--top-k", type=click.IntRange(min=1), help="Sample among so many likeliest; default: among all."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampling.")
@click.option("--ignore-end", is_flag=True, help="Go on where the model ends its text.")
@_PORT
def generate(
    run: Path,
    overrides: tuple[str, ...],
    prompts: tuple[str, ...],
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    ignore_end: bool,
    port: int,
) -> None:
    """Samples text from a trained run: RUN is the run's directory, or one of its checkpoints.

    One process does it, whatever layout the run was trained on; with parallel.tensor, parallel.pipeline or both as many
    local ranks, each of which reads and holds its own part of the model. The text is the same. It ends where the model
    ends it, with the end-of-text token of the run's tokenizer, or after --tokens.

    \b
    Example:
      shardweave generate runs/quickstart --prompt "def " --tokens 300
      shardweave generate runs/large --prompt "def " --prompt "class " parallel.tensor=4 parallel.pipeline=2
    """
    from shardweave.launcher.sampling import Sampling

    sampling = Sampling(tokens, temperature, top_k, seed, ignore_end)
    if overrides:
        from shardweave.launcher.generate_local import generate_on_ranks

        sys.exit(generate_on_ranks(run, prompts, overrides, sampling, port))
    from shardweave.launcher.generate import generate_text

    sys.exit(generate_text(run, prompts, sampling))


@cli.command("import")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@_OVERRIDES
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The run's directory, which is made."
)
@_PORT
def import_(directory: Path, overrides: tuple[str, ...], out: Path, port: int) -> None:
    """Makes a run of the published weights in DIR: config.json, safetensors files and a tokenizer's.

    For GPT-2, BLOOM, GPT-NeoX, Llama and Mixtral. The run has a checkpoint of step 0, from which `train` goes on, and
    a config.yaml with the whole shape. KEY=VALUE changes the configuration; with a layout (parallel.*) as many local
    ranks read the files, each its own part, so that a model larger than the memory of one passes.

    \b
    Example:
      shardweave import Llama-3.1-8B --out runs/llama model.sequence=4096 parallel.tensor=4
      shardweave train runs/llama/config.yaml data.source=my_texts
    """
    from shardweave.launcher.import_export import import_directory

    sys.exit(import_directory(directory, out, overrides, port))


@cli.command()
@_RUN
@_OVERRIDES
@click.option(
    "--format",
    "_kind",
    type=click.Choice(["huggingface"]),
    default="huggingface",
    show_default=True,
    help="config.json and safetensors files, which transformers reads.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The directory, which is made.")
@click.option(
    "--family", help="gpt2, bloom, gpt_neox, llama or mixtral; default: the one that the model fits."
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16", "bf16", "fp64", "float32", "float16", "bfloat16", "float64"]),
    help="Of the files; default: the checkpoint's.",
)
@click.option("--shard-size", default="5GB", show_default=True, help="Of one file, at most.")
@_PORT
def export(
    run: Path,
    overrides: tuple[str, ...],
    _kind: str,
    out: Path,
    family: str | None,
    dtype: str | None,
    shard_size: str,
    port: int,
) -> None:
    """Writes the weights of RUN, or of one of its checkpoints, as a directory of Hugging Face files.

    One process does it; with a layout (parallel.*) as many local ranks, each of which reads and writes its own part.
    Tokenizer files that an import brought along are in the directory again.

    \b
    Example:
      shardweave export runs/llama --format huggingface --out llama-tuned --dtype bf16 parallel.tensor=4
    """
    from shardweave.launcher.import_export import export_run

    sys.exit(export_run(run, out, overrides, family=family, dtype=dtype, shard_size=shard_size, port=port))


@cli.group()
def checkpoint() -> None:
    """Looks at what a run has saved. RUN is its directory, or one checkpoint's.

    \b
    Example:
      shardweave checkpoint list runs/quickstart
    """


@checkpoint.command("list")
@_RUN
@_JSON
def list_(run: Path, as_json: bool) -> None:
    """Lists the checkpoints of RUN, unfinished ones too.

    \b
    Example:
      shardweave checkpoint list runs/quickstart
    """
    from shardweave.launcher.looking import list_checkpoints

    sys.exit(list_checkpoints(run, as_json=as_json))


@checkpoint.command("verify")
@_RUN
@_JSON
def verify_files(run: Path, as_json: bool) -> None:
    """Reads every byte of RUN's checkpoints and compares checksums; status 1 when something is damaged.

    \b
    Example:
      shardweave checkpoint verify runs/quickstart
    """
    from shardweave.launcher.looking import verify_checkpoints

    sys.exit(verify_checkpoints(run, as_json=as_json))


@checkpoint.command()
@_RUN
@click.option("--tensors", is_flag=True, help="Every tensor with shape and type.")
@_JSON
def show(run: Path, tensors: bool, as_json: bool) -> None:
    """Says what is in RUN's newest whole checkpoint.

    \b
    Example:
      shardweave checkpoint show runs/quickstart/checkpoints/step-00000020 --tensors
    """
    from shardweave.launcher.looking import show_checkpoint

    sys.exit(show_checkpoint(run, tensors=tensors, as_json=as_json))


cli.add_command(data)
cli.add_command(schedule)


def _nodes(nnodes: str, endpoint: str | None, ranks: int | None, job: str | None, patience: float) -> Nodes:
    if endpoint is None:
        raise click.UsageError(
            "--nnodes needs --rdzv-endpoint HOST:PORT, such as node0:29400: where machines meet"
        )
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 2**16):
        raise click.BadParameter(
            f"{endpoint!r} is not HOST:PORT, such as node0:29400", param_hint="--rdzv-endpoint"
        )
    try:
        least, most = Nodes.counts(nnodes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--nnodes") from None
    return Nodes(least, most, endpoint, ranks, job, patience)


def _fill_standard_streams() -> None:
    """Opens /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise the next socket or file gets its number, and whoever redirects "stdout" cuts a socket off.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main() -> None:
    """Entry point of the command: exit status 2 for a mistake of the user, 130 for Ctrl-C."""
    _fill_standard_streams()
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(USAGE_ERROR)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
