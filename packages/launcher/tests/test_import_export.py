"""The two commands, from a directory of published files to a run and back, and what they say to a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from packages.launcher.tests.commands import run, start_joined
from packages.launcher.tests.small_tokenizers import ENDING, byte_level, saved

from shardweave.launcher.reading import load_config
from shardweave.models import Transformer, TransformerConfig, from_huggingface, to_huggingface
from shardweave.zero.checkpoint import FromCheckpoint, read_tensors

GPT2 = TransformerConfig(
    layers=2,
    hidden=16,
    heads=4,
    ffn=22,
    vocab=257,
    sequence=16,
    position="learned",
    activation="gelu_tanh",
    dropout=0.1,
)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Files as somebody published them."""
    model = Transformer(GPT2, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    directory = to_huggingface(model, tmp_path / "published")
    (directory / "merges.txt").write_text("a b")
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 256}))
    return directory


def test_published_weights_become_a_run_are_trained_and_go_out_again(published: Path, tmp_path: Path) -> None:
    status, out, err = run(
        tmp_path, "import", "published", "--out", "runs/tuned", "parallel.tensor=2", "parallel.pipeline=2"
    )
    assert status == 0, out + err
    assert err.startswith("warning: the tokenizer that came along is not used, and text is bytes: ")
    assert "shardweave train runs/tuned/config.yaml trains it" in out
    config = load_config(tmp_path / "runs/tuned/config.yaml")
    assert (config.run.name, config.model.weights, config.model.vocab, config.model.ffn) == (
        "tuned",
        str(published),
        257,
        22,
    )
    assert (config.model.dropout, config.model.position, config.parallel.tensor) == (0.1, "learned", 2)
    first = tmp_path / "runs/tuned/checkpoints/step-00000000"
    before = dict(from_huggingface(published).named_parameters())
    assert {name: values.tolist() for name, values in read_tensors(first).items()} == {
        name: values.tolist() for name, values in before.items()
    }

    status, out, err = run(
        tmp_path, "export", "runs/tuned", "--out", "same", "--shard-size", "4KB", "parallel.tensor=2"
    )
    assert (status, err) == (0, ""), out + err
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 2
    for name, values in from_huggingface(tmp_path / "same").named_parameters():
        assert torch.equal(values, before[name]), name
    assert (tmp_path / "same/merges.txt").read_text() == "a b"
    assert json.loads((tmp_path / "same/config.json").read_text())["eos_token_id"] == 256

    short = ["run.steps=2", "run.device=cpu", "run.eval_every=0", "batch.global=4", "data.source=text.txt"]
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged, " * 40)
    status, out, err = run(tmp_path, "train", "runs/tuned/config.yaml", "parallel.pipeline=1", *short)
    assert status == 0, out + err
    assert "resumed from" in out
    assert "at step 0" in out
    assert "start from step 0: runs/tuned/checkpoints/step-00000000" in " ".join(out.split())
    assert "warning: the text" not in out
    assert "warning: `data.tokenizer: byte`: the weights come with a tokenizer" in err.replace("\n", " ")
    status, out, err = run(tmp_path, "generate", "runs/tuned", "--prompt", "It", "--tokens", "1")
    assert (status, "ids 0 to 255 mean bytes here" in err) == (0, True), out + err
    status, out, err = run(tmp_path, "export", "runs/tuned", "--out", "tuned", "--dtype", "bf16")
    assert (status, err) == (0, ""), out + err
    tuned = dict(from_huggingface(tmp_path / "tuned").named_parameters())
    assert {values.dtype for values in tuned.values()} == {torch.bfloat16}
    last = read_tensors(tmp_path / "runs/tuned/checkpoints/step-00000002")
    for name, wide in last.items():
        assert torch.equal(tuned[name], wide.to(torch.bfloat16)), name
    assert not torch.equal(last["norm.weight"], before["norm.weight"])


def test_mistakes_end_with_status_2_and_a_sentence(published: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        status, out, err = run(tmp_path, *arguments)
        assert (status, out) == (2, ""), out + err
        assert err.startswith("error: ")
        return err

    assert "nowhere/config.json does not exist" in refused("import", "nowhere", "--out", "run")
    assert "--out published exists" in refused("import", "published", "--out", "published")
    text = refused("import", "published", "--out", "run", "parallel.tensor=3")
    assert "parallel.tensor: 3" in text
    assert "has no config.yaml" in refused("export", "published", "--out", "elsewhere")
    (published / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in refused("import", "published", "--out", "run")
    assert not (tmp_path / "run").exists()
    for name, *arguments in (
        ("export", "run", "--out", "out"),
        ("generate", "run", "--prompt", "a", "parallel.tensor=2"),
    ):
        with start_joined(tmp_path, 1, name, *arguments) as (command,):
            status, _, err = command.end()
        assert status == 2
        assert f"`shardweave {name}` starts its own ranks" in err


def test_the_weights_of_a_configuration_that_is_not_theirs_are_refused_before_a_rank_starts(
    published: Path, tmp_path: Path
) -> None:
    for more in ((), ("--dry-run",)):
        status, _, err = run(tmp_path, "train", "model.weights=published", "run.device=cpu", *more)
        assert status == 2
        assert "model.weights: published holds another model: layers: 4, but 2 in the directory" in err
        assert "head_dim: 32, but 4 in the directory; ffn: " in err
        assert "change these, or `shardweave import published --out RUN`" in err
    status, _, err = run(tmp_path, "train", "model.weights=nothere", "--dry-run")
    assert status == 2
    assert "model.weights: nothere/config.json does not exist" in err


def test_an_imported_run_begins_with_its_weights_under_any_name_and_from_any_place(
    published: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "text.txt").write_text("It is a truth universally acknowledged, " * 40)
    status, out, err = run(tmp_path, "import", "published", "--out", "runs/one")
    assert status == 0, out + err
    short = [
        "run.device=cpu",
        "run.eval_every=0",
        "batch.global=2",
        "data.source=text.txt",
        "optimizer.lr=1e-30",
    ]
    short += ["optimizer.min_lr=0", "optimizer.weight_decay=0", "run.steps=1"]
    status, out, err = run(elsewhere, "train", "../runs/one/config.yaml", "run.name=two", *short)
    assert status == 0, out + err
    assert f"start from the weights in {published}" in " ".join(out.split())
    held = read_tensors(elsewhere / "runs/two/checkpoints/step-00000001")
    for name, values in from_huggingface(published).named_parameters():
        assert torch.allclose(held[name], values.detach(), rtol=0, atol=1e-12), name

    published.rename(tmp_path / "gone")
    status, out, err = run(elsewhere, "train", "runs/two/config.yaml", "--dry-run")
    assert status == 0, out + err  # a checkpoint goes before them
    assert "start from step 1: runs/two" in " ".join(out.split())
    status, out, err = run(elsewhere, "train", "runs/two/config.yaml", "run.name=three", "--dry-run")
    assert status == 2
    assert "config.json does not exist" in err


def test_a_checkpoint_of_another_model_is_not_read(published: Path, tmp_path: Path) -> None:
    status, out, err = run(tmp_path, "import", "published", "--out", "run")
    assert status == 0, out + err
    model = Transformer(GPT2, seed=9)
    source = FromCheckpoint(tmp_path / "run/checkpoints/step-00000000")
    for parameter in model.parameters():
        source(parameter)
    for name, values in from_huggingface(published).named_parameters():
        assert torch.equal(model.get_parameter(name), values)


@pytest.mark.timeout(120)
def test_the_tokenizer_that_comes_along_is_the_runs_and_goes_out_again(
    published: Path, tmp_path: Path
) -> None:
    """Exactly as it came, with text that is in and out of it; also after the run was moved."""
    (published / "merges.txt").unlink()
    shape = published / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"eos_token_id": None}))
    made = byte_level(vocab=257)
    saved(made, published, tokenizer_config={"eos_token": ENDING})
    status, out, err = run(tmp_path, "import", "published", "--out", "runs/own")
    assert (status, err) == (0, ""), out + err
    kept = tmp_path / "runs/own/huggingface"
    assert load_config(tmp_path / "runs/own/config.yaml").data.tokenizer == str(kept)
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged, " * 40)
    short = ["run.steps=1", "run.device=cpu", "batch.global=4", "data.source=text.txt", "data.validation=0.2"]
    status, out, err = run(tmp_path, "train", "runs/own/config.yaml", *short)
    assert (status, "warning" in err) == (0, False), out + err
    assert "bits per byte" in out
    (tmp_path / "runs").rename(tmp_path / "moved")
    asked = ("generate", "moved/own", "--prompt", "It  is ", "--tokens", "3", "--temperature", "0")
    status, alone, err = run(tmp_path, *asked)
    assert (status, err) == (0, "")
    assert alone.startswith("It  is ")
    status, out, err = run(tmp_path, *asked, "parallel.tensor=2")
    assert (status, out, err) == (0, alone, "")
    status, out, err = run(tmp_path, "export", "moved/own", "--out", "again")
    assert (status, err) == (0, ""), out + err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (published / name).read_bytes(), name
    # The config.json that came says none; the tokenizer does.
    assert json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"] == made.token_to_id(
        ENDING
    )


def test_a_tokenizer_with_more_tokens_than_the_model_is_not_taken_and_another_is_if_asked_for(
    published: Path, tmp_path: Path
) -> None:
    (published / "merges.txt").unlink()
    saved(byte_level(vocab=300), published, tokenizer_config={"eos_token": ENDING})
    status, out, err = run(tmp_path, "import", "published", "--out", "runs/more")
    assert status == 0, out + err
    assert "tokens, and the model 257; name another with data.tokenizer" in err
    assert load_config(tmp_path / "runs/more/config.yaml").data.tokenizer == "byte"
    status, out, err = run(tmp_path, "import", "published", "--out", "runs/asked", "data.tokenizer=byte")
    assert (status, err) == (0, ""), out + err
