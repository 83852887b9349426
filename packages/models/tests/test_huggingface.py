"""Weights go out and come back bit by bit, in any layout, and transformers reads what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.models.tests.reference import FAMILIES, MIXTURES, build
from packages.models.tests.theirs import THEIRS, Family, by_our_names, in_float64, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardweave import comm
from shardweave.comm import Mesh
from shardweave.models import (
    Part,
    Transformer,
    TransformerConfig,
    from_huggingface,
    huggingface_config,
    load_huggingface,
    to_huggingface,
)
from shardweave.models.huggingface import HuggingFaceError
from shardweave.models.huggingface.directory import Weights

PARTS = (Part(0, 1, embedding=True, head=False), Part(1, 2, embedding=False, head=True))
"""Two stages of a model of two blocks."""

EAGER = {"experts_implementation": "eager"}
"""The other one is for float32."""

GPT2, LLAMA = FAMILIES["gpt2"], FAMILIES["llama"]
BLOOM = replace(FAMILIES["bloom"], activation="gelu_tanh")


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def tensors_in(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def expect_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", THEIRS)
def test_their_files_come_in_and_go_out_bit_for_bit(family: Family, tmp_path: Path) -> None:
    """In one file and three, in float64 and bfloat16; transformers loads ours, and has the same logits as before."""
    from transformers import AutoModelForCausalLM

    theirs, config = tiny(family)
    theirs.save_pretrained(tmp_path / "theirs")
    model = from_huggingface(tmp_path / "theirs").eval()
    for field in (
        "vocab",
        "head_size",
        "num_kv_heads",
        "ffn_size",
        "rotary_scaling",
        "tie_embeddings",
        "activation",
    ):
        assert getattr(model.config, field) == getattr(config, field)
    expect_equal(weights_of(model), by_our_names(config, theirs.state_dict()))

    size = sum(parameter.nbytes for parameter in model.parameters())
    to_huggingface(model, tmp_path / "ours", shard_size=int(size * 0.45))
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) == 3
    expect_equal(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    expect_equal(weights_of(from_huggingface(tmp_path / "ours")), weights_of(model))
    with in_float64():
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours",
            local_files_only=True,
            dtype=torch.float64,
            **(EAGER if family == "mixtral" else {}),
        ).eval()
        tokens = torch.randint(config.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
        logits = again(input_ids=tokens).logits
    ours = model(tokens).transpose(0, 1)
    torch.testing.assert_close(ours, logits, rtol=1e-6, atol=1e-6)  # BLOOM rounds a constant

    to_huggingface(model, tmp_path / "narrow", dtype=torch.bfloat16)
    narrow = from_huggingface(tmp_path / "narrow")
    expect_equal(weights_of(narrow), {name: p.to(torch.bfloat16) for name, p in weights_of(model).items()})
    to_huggingface(narrow, tmp_path / "again", tokenizer_from=tmp_path / "narrow")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "narrow/model.safetensors"
    ).read_bytes()
    assert not (tmp_path / "again.partial").exists()


@pytest.mark.ranks(4)
def test_any_layout_writes_and_any_reads(tmp_path: Path) -> None:
    """Written by tp 2 and pp 2, read by tp 4 (11 tokens and two key heads over four ranks) and by one process."""
    for number, config in enumerate((GPT2, BLOOM, LLAMA)):
        directory = tmp_path / f"stages-{number}"
        mesh = Mesh(tp=2, pp=2)
        part = build(config, tensor=mesh.tp, part=PARTS[mesh.pp.rank])
        record_stages(part, mesh)
        expect_written(mesh, part, directory)
        mesh.close()
        mesh = Mesh(tp=4)
        split = expect_read(mesh, config, directory, tensor=mesh.tp)
        again = to_huggingface(split, tmp_path / f"again-{number}", world=mesh.world, shard_size="6KB")
        for path in directory.iterdir():  # also where two ranks have copies of a key head
            assert path.read_bytes() == (again / path.name).read_bytes(), path.name
        mesh.close()
    config = MIXTURES["mixtral"]
    mesh = Mesh(dp=2, ep=2, tp=2)
    spread: dict[str, Any] = {"tensor": mesh.tp, "expert": mesh.ep, "expert_data": mesh.expert_data}
    expect_written(mesh, build(config, **spread), tmp_path / "experts")
    expect_read(mesh, config, tmp_path / "experts", **spread)
    mesh.close()


def record_stages(part: Transformer, mesh: Mesh) -> None:
    """That stages differ, and share a tied embedding, as a pipeline records it."""
    tied = [parameter for _, parameter in part.tied_parameters()]
    for parameter in part.parameters():
        shared = mesh.pp.subset((0, 1)) if any(parameter is one for one in tied) else None
        record = replace(comm.sharding_of(parameter), exclusive=(mesh.pp,), tied=shared)
        comm.set_sharding(parameter, record)


def expect_written(mesh: Mesh, part: Transformer, directory: Path) -> None:
    before = mesh.ledger.total().bytes
    to_huggingface([part], directory, world=mesh.world, shard_size="6KB")
    assert mesh.ledger.total().bytes - before < 500  # whether it went well, and no parameter
    assert len(list(directory.glob("*.safetensors"))) > 2
    assert not directory.with_name(directory.name + ".partial").exists()


def expect_read(mesh: Mesh, config: TransformerConfig, directory: Path, **layout: Any) -> Transformer:
    """By each rank what it holds, no element more, and nothing is sent."""
    whole = weights_of(build(config))
    before, read = mesh.ledger.total().bytes, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "read", counting(read))
        split = from_huggingface(directory, **layout)
    assert mesh.ledger.total().bytes == before
    assert sum(read) == sum(parameter.numel() for parameter in split.parameters())
    for name, parameter in split.named_parameters():
        assert torch.equal(parameter, whole[name][comm.full_index(parameter)]), name
    assert huggingface_config(directory).vocab == config.vocab == 11
    if mesh.world.is_first:
        expect_equal(weights_of(from_huggingface(directory)), whole)
    return split


def counting(read: list[int]) -> Callable[[Weights, str, tuple[slice, ...]], Tensor]:
    original = Weights.read

    def counted(self: Weights, name: str, index: tuple[slice, ...]) -> Tensor:
        block = original(self, name, index)
        read.append(block.numel())
        return block

    return counted


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A directory with a small GPT-2."""
    return to_huggingface(build(GPT2), tmp_path / "gpt2")


def change(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(directory: Path, changed: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    changed(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_older_files_leave_out_the_prefix_and_hold_buffers(gpt2: Path) -> None:
    def older(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["h.1.attn.masked_bias"] = torch.ones(())
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    rewrite(gpt2, older)
    expect_equal(weights_of(from_huggingface(gpt2)), weights_of(build(GPT2)))


def test_everything_that_is_wrong_is_told_at_once(gpt2: Path) -> None:
    def damaged(tensors: dict[str, Tensor]) -> None:
        del tensors["transformer.h.0.ln_1.weight"], tensors["transformer.ln_f.bias"]
        tensors["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(64, 16)
        tensors["transformer.h.7.ln_1.weight"] = torch.zeros(16)
        tensors["transformer.wpe.weight"] = torch.zeros(8, 16, dtype=torch.int32)

    rewrite(gpt2, damaged)
    model = build(GPT2)
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    with pytest.raises(HuggingFaceError) as caught:
        load_huggingface(model, gpt2)
    assert str(caught.value) == (
        f"{gpt2} does not hold the gpt2 model that its config.json describes: "
        "missing: transformer.h.0.ln_1.weight, transformer.ln_f.bias; "
        "not of such a model: transformer.h.7.ln_1.weight; "
        "of another shape: transformer.h.1.mlp.c_fc.weight is [64, 16] instead of [16, 64]; "
        "of a type that is not one of F64, F32, F16, BF16: transformer.wpe.weight is I32"
    )
    expect_equal(weights_of(model), before)


def test_a_head_that_is_not_the_embedding_is_refused(gpt2: Path) -> None:
    def untied(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["lm_head.weight"][10, 3] += 1e-9

    rewrite(gpt2, untied)
    with pytest.raises(HuggingFaceError, match=r"lm_head.weight and transformer.wte.weight differ"):
        from_huggingface(gpt2)
    change(gpt2, tie_word_embeddings=False)
    assert not from_huggingface(gpt2).config.tie_embeddings


def test_a_model_of_another_shape_is_not_filled(gpt2: Path) -> None:
    with pytest.raises(HuggingFaceError, match="heads: 2, but 4 in the directory; head_dim: 8, but 4"):
        load_huggingface(build(replace(GPT2, heads=2)), gpt2)
    with pytest.raises(HuggingFaceError, match="sequence: 16, but 8 learned positions"):
        load_huggingface(build(replace(GPT2, sequence=16)), gpt2)
    load_huggingface(build(replace(GPT2, dropout=0.5)), gpt2)  # of training, not of the function


def test_files_that_are_not_whole(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(HuggingFaceError, match=r"nowhere/config.json does not exist; give a directory"):
        huggingface_config(tmp_path / "nowhere")
    whole = (gpt2 / "model.safetensors").read_bytes()
    (gpt2 / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(HuggingFaceError, match=r"model.safetensors cannot be read.*cut short"):
        from_huggingface(gpt2)
    (gpt2 / "model.safetensors").rename(gpt2 / "pytorch_model.bin")
    with pytest.raises(HuggingFaceError, match=r"pytorch_model.bin, which may run code"):
        from_huggingface(gpt2)
    many = to_huggingface(build(GPT2), tmp_path / "many", shard_size="6KB")
    next(many.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(HuggingFaceError, match=r"model-00002-of-.* cannot be read"):
        from_huggingface(many)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    index["weight_map"] = {"transformer.wte.weight": "../elsewhere.safetensors"}
    (many / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HuggingFaceError, match="no weight_map"):
        from_huggingface(many)


def test_what_cannot_be_written_is_told_before(gpt2: Path, tmp_path: Path) -> None:
    model = build(GPT2)
    with pytest.raises(HuggingFaceError, match="gpt2 cannot be written: it exists"):
        to_huggingface(model, gpt2)
    with pytest.raises(ValueError, match="qk_norm: True"):
        to_huggingface(build(FAMILIES["plain"]), tmp_path / "plain")
    with pytest.raises(HuggingFaceError, match="hold 3584 of the 6896 elements"):
        to_huggingface(build(GPT2, part=PARTS[0]), tmp_path / "half")
    assert not any(path.name.startswith("half") for path in tmp_path.iterdir())


def test_tokenizer_files_and_special_tokens_travel(gpt2: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "unrelated.txt"):
        (gpt2 / name).write_text(name)
    change(gpt2, eos_token_id=[3, 4], bos_token_id=2)
    out = to_huggingface(from_huggingface(gpt2), tmp_path / "out", tokenizer_from=gpt2)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer_config.json",
    }  # fmt: skip
    assert (out / "merges.txt").read_text() == "merges.txt"
    told = json.loads((out / "config.json").read_text())
    assert (told["eos_token_id"], told["bos_token_id"], told["pad_token_id"]) == ([3, 4], 2, None)
