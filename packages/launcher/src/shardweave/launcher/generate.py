"""``shardweave generate``: text from a trained run, whatever layout it was trained on, in one process.

`generate_local` makes the same text on several ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from shardweave.launcher.config import Config
from shardweave.launcher.data.tokenizer import Tokenizer
from shardweave.launcher.describe import fail
from shardweave.launcher.foreign_tokens import foreign_tokens
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.prompts import prompt_tokens, text_of
from shardweave.launcher.reading import load_config
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.sampling import Sampling
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.words import tokenizer_of
from shardweave.models import Transformer
from shardweave.models import generate as sample
from shardweave.zero.checkpoint import CheckpointError, complete_checkpoints, read_tensors
from shardweave.zero.checkpoint.folder import step_of

__all__ = ["encoded", "generate_text", "load_model", "locate", "located", "others", "warnings", "words_of"]


def generate_text(path: Path, prompts: Sequence[str], sampling: Sampling) -> int:
    """Prints the prompts and their continuations, computed in this process; returns the exit status."""
    try:
        run, checkpoint = located(path)
        config = load_config(run / "config.yaml")
        words = words_of(config, run)
        texts = encoded(words, prompts)
        model = load_model(run, checkpoint)
    except CheckpointError as error:
        return fail(CheckpointError(f"{error}{others(path)}"))
    except ConfigError as error:
        return fail(error)
    for warning in warnings(config, run, checkpoint):
        print(f"warning: {warning}", file=sys.stderr)
    for prompt, text in zip(prompts, texts, strict=True):
        found = sample(
            model,
            torch.tensor([text], dtype=torch.int64),  # [1, s]
            sampling.tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            generator=torch.Generator().manual_seed(sampling.seed),
            end=None if sampling.ignore_end else words.end_of_text,
        )
        continued = text_of(words, prompt, found[0].tolist(), ignore_end=sampling.ignore_end)
        sys.stdout.write(continued + "\n")
    return 0


def words_of(config: Config, run: Path) -> Tokenizer:
    """The tokenizer of a run, also of an imported one that was moved together with the tokenizer in its directory.

    Raises:
        ConfigError: as `tokenizer_of`.
    """
    moved = RunDirectory(run).huggingface
    try:
        return tokenizer_of(config)
    except ConfigError:
        if Path(config.data.tokenizer).name != moved.name or not moved.is_dir():
            raise
    return tokenizer_of(
        config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(moved)})})
    )


def warnings(config: Config, run: Path, checkpoint: Path) -> Iterator[str]:
    """What a person should know who reads a text of this checkpoint."""
    if foreign := foreign_tokens(config, run):
        yield foreign
    if step_of(checkpoint) == 0 and config.model.weights is None:
        yield f"{checkpoint} is of step 0: this model has seen no training yet, and its text is noise"


def encoded(words: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The prompts' tokens.

    Raises:
        ConfigError: for one without any.
    """
    if not all(prompts):
        raise ConfigError([Problem((), "--prompt is empty; give at least one character to continue")])
    return [prompt_tokens(words, prompt) for prompt in prompts]


def located(path: Path) -> tuple[Path, Path]:
    """As `locate`, with every error a ConfigError that names what else the run has."""
    try:
        return locate(path)
    except CheckpointError as error:
        raise ConfigError([Problem((), f"{error}{others(path)}")]) from None


def load_model(run: Path, checkpoint: Path) -> Transformer:
    """The whole model of a run with a checkpoint's weights, in float32 or wider, ready to evaluate.

    Raises:
        ConfigError: for a run whose configuration does not load.
        CheckpointError: for a checkpoint that is not whole, or of another model than the configuration's.
    """
    shape = transformer_config(load_config(run / "config.yaml"))
    weights = read_tensors(checkpoint)
    dtype = next((values.dtype for values in weights.values()), torch.float32)
    model = Transformer(shape, device="meta", dtype=dtype).to_empty(device="cpu")
    held, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if held.keys() != weights.keys() or any(held[name].shape != weights[name].shape for name in held):
        raise CheckpointError(f"{checkpoint} holds another model than {run / 'config.yaml'} describes")
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.copy_(weights[name])
        extra = read_tensors(checkpoint, [f"extra/{name}" for name in buffers]) if buffers else {}
        for name, buffer in buffers.items():
            buffer.copy_(extra[f"extra/{name}"])
    return model.eval()


def others(path: Path) -> str:
    """What else a run has, when its newest checkpoint cannot be read: a person decides, not a silent fall back."""
    try:
        older = [str(one) for _, one in complete_checkpoints(path / "checkpoints")[:-1]]
    except CheckpointError:
        return ""
    return f"; give an earlier checkpoint instead of the run: {', '.join(reversed(older))}" if older else ""


def locate(path: Path) -> tuple[Path, Path]:
    """The run and the checkpoint that a path names: a run's newest one, or the one itself."""
    if (path / "complete").exists() and (path.parent.parent / "config.yaml").exists():
        return path.parent.parent, path
    if not (path / "config.yaml").is_file():
        raise ConfigError([Problem((), f"{path} is not the directory of a run: it has no config.yaml")])
    found = complete_checkpoints(path / "checkpoints")
    if not found:
        raise ConfigError(
            [
                Problem(
                    (),
                    f"the run {path} has no whole checkpoint yet (checkpoint.every decides when one is saved)",
                )
            ]
        )
    return path, found[-1][1]
