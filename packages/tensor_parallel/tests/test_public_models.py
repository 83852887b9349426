"""Models of transformers, split by the plans that ship: equal to the original in everything, and back.

Random weights, and every parameter random, biases and norms too: as transformers makes them, zeros and ones would hide
a bias that is added twice. transformers is imported for these ranks alone: it takes seconds, and the other tests do
without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packages.tensor_parallel.tests.reference import assert_near, values
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, RandomStreams, full_index, sharding_of, sum_partial_gradients
from shardweave.tensor_parallel import assert_replicas_equal, gather, parallelize

VOCABULARY, SEQUENCE, HIDDEN, HEADS = 67, 11, 24, 4

TRANSFORMERS = [
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "auto", "gpt2", "llama", "bloom", "gpt_neox", "mistral", "qwen2", "granite", "smollm3", "qwen3", "gemma",
        "gemma2", "gemma3", "starcoder2", "phi", "opt", "gptj", "gpt_neo",
    )
]  # fmt: skip


def configs(attention: str, **options: Any) -> Iterator[Any]:
    """One of each kind, and Llama with its head tied to its embedding and with as many key heads as query heads."""
    from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, LlamaConfig

    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "attn_implementation": attention}
    yield GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=2, n_head=HEADS, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, **ends,
    )  # fmt: skip
    for shared, tied in ((2, False), (4, True)):
        yield LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=HIDDEN, intermediate_size=45,
            num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=shared, attention_bias=True,
            head_dim=8, mlp_bias=True, tie_word_embeddings=tied, **ends,
        )  # fmt: skip
    yield BloomConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=2, n_head=HEADS, hidden_dropout=0.0,
        attention_dropout=0.0, **ends | {"attn_implementation": "eager"},
    )  # fmt: skip
    yield GPTNeoXConfig(
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=HIDDEN, intermediate_size=45,
        num_hidden_layers=2, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0, **ends,
    )  # fmt: skip


def more_configs() -> Iterator[Any]:
    """Of the kinds whose plans are made of parts of the others' plans, small enough to be quick."""
    import transformers

    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "attn_implementation": "eager"}
    llama = {
        "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "hidden_size": HIDDEN, "intermediate_size": 45,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    }  # fmt: skip
    yield transformers.MistralConfig(**llama, head_dim=8, sliding_window=4, **ends)
    yield transformers.Qwen2Config(**llama, **ends)
    yield transformers.GraniteConfig(**llama, attention_multiplier=0.3, residual_multiplier=0.7, **ends)
    yield transformers.SmolLM3Config(**llama, pad_token_id=0, **ends)
    for name in ("Qwen3", "Gemma", "Gemma2", "Gemma3Text"):
        yield getattr(transformers, f"{name}Config")(**llama, head_dim=8, pad_token_id=0, **ends)
    yield transformers.Starcoder2Config(**llama, residual_dropout=0.0, embedding_dropout=0.0, **ends)
    yield transformers.PhiConfig(**llama | {"hidden_size": 32}, qk_layernorm=True, **ends)
    yield transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=1, ffn_dim=45, num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE, dropout=0.0, word_embed_proj_dim=16, do_layer_norm_before=True, **ends,
    )  # fmt: skip
    yield transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=1, n_head=HEADS, rotary_dim=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends,
    )  # fmt: skip
    yield transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=HIDDEN, num_layers=2, num_heads=HEADS,
        attention_types=[[["global", "local"], 1]], window_size=4, resid_dropout=0.0, embed_dropout=0.0,
        attention_dropout=0.0, **ends,
    )  # fmt: skip


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model with every parameter random, the same on all ranks."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.2 * values(*parameter.shape, seed=index).to(dtype))
    return model.train()


def step(model: nn.Module, number: int = 0) -> tuple[Tensor, Tensor]:
    """Loss and logits of a batch whose second row is padded, and the gradients."""
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(number))
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    model.zero_grad()
    output = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    output.loss.backward()
    return output.loss.detach(), output.logits.detach()


def assert_close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    """To 1e-5 in float32; in float64 as closely as sums in another order are."""
    assert found is not None
    assert expected is not None
    if found.dtype == torch.float64:
        assert_near(found, expected, what)
    else:
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda text: f"{what}: {text}"
        )


def assert_gradients(split: nn.Module, original: nn.Module) -> None:
    """Every gradient is the rank's part of the original's; a block of a Conv1D has it the other way round."""
    whole = dict(original.named_parameters())
    for name, parameter in split.named_parameters():
        if name in whole:
            expected = whole[name].grad
        else:
            block = re.fullmatch(r"(.*)\.(\d)\.(weight|bias)", name)
            assert block is not None
            grad = whole[f"{block[1]}.{block[3]}"].grad
            assert grad is not None
            expected = grad.t().chunk(3)[int(block[2])]
        assert expected is not None
        assert_close(parameter.grad, expected[full_index(parameter)], name)


def assert_same_module(found: nn.Module, original: nn.Module) -> None:
    """Classes, options, attributes, names and bits."""
    assert repr(found) == repr(original)
    for (path, left), (other, right) in zip(found.named_modules(), original.named_modules(), strict=True):
        assert (path, type(left)) == (other, type(right))
        for name in right.__dict__:
            if isinstance(getattr(right, name), (int, float, str, bool)):
                assert getattr(left, name) == getattr(right, name), f"{path}.{name}"
        assert left.__dict__.keys() == right.__dict__.keys()
        assert not left._forward_pre_hooks
    names = [list(module.named_parameters(remove_duplicate=False)) for module in (found, original)]
    assert [name for name, _ in names[0]] == [name for name, _ in names[1]]
    ties = [[[id(other) for _, other in some].index(id(p)) for _, p in some] for some in names]
    assert ties[0] == ties[1]
    for name, tensor in original.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    for parameter in found.parameters():
        assert sharding_of(parameter).splits == ()
        assert sharding_of(parameter).partial == ()
        assert sharding_of(parameter).shape == tuple(parameter.shape)


def trains_alike(config: Any, axis: Axis, dtype: torch.dtype) -> None:
    """There, back, there again, two steps, and back."""
    original, split = build(config, dtype), build(config, dtype)
    assert parallelize(split, "auto", axis) is split
    assert sum(p.numel() for p in split.parameters()) < sum(p.numel() for p in original.parameters())
    assert gather(split, axis) is split
    assert_same_module(split, original)
    parallelize(split, "auto", axis)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5) for module in (split, original)]
    for number in range(2):
        for found, expected, what in zip(
            step(split, number), step(original, number), ("loss", "logits"), strict=True
        ):
            assert_close(found, expected, what)
        sum_partial_gradients(split.parameters())
        assert_gradients(split, original)
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_equal(split, axis)
    with pytest.raises(ValueError, match="has a gradient of this rank's slice"):
        gather(split, axis)
    split.zero_grad()
    gather(split, axis)
    for (name, left), right in zip(split.named_parameters(), original.parameters(), strict=True):
        assert_close(left.detach(), right.detach(), name)
    assert_close(step(split)[1], step(original)[1], "logits of the gathered model")


def computes_alike(config: Any, axis: Axis, dtype: torch.dtype) -> None:
    """One step and back."""
    original, split = build(config, dtype), build(config, dtype)
    parallelize(split, "auto", axis)
    whole = dict(original.named_parameters())
    for path, module in split.named_modules():
        if path.endswith(("_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "dense")):
            weight = module.get_parameter("weight")
            assert weight.numel() < whole[f"{path}.weight"].numel(), path
    for found, expected, what in zip(step(split), step(original), ("loss", "logits"), strict=True):
        assert_close(found, expected, what)
    sum_partial_gradients(split.parameters())
    assert_gradients(split, original)
    split.zero_grad()
    gather(split, axis)
    assert_same_module(split, original)


def forks(config: Any, axis: Axis) -> None:
    """Where attention drops anything, its random numbers are forked from its begin to its output."""
    from transformers import AutoModelForCausalLM

    config.update({name: 0.4 for name in vars(config) if name in ("attention_dropout", "attn_pdrop")})
    with torch.device("meta"):
        split = parallelize(AutoModelForCausalLM.from_config(config), "auto", axis)
    outputs = {"o_proj", "out_proj", "dense"}
    attentions = [m for m in split.modules() if outputs & dict(m.named_children()).keys()]
    assert len(attentions) >= 1
    for attention in attentions:
        ends = [child for child in attention.children() if child._forward_pre_hooks]
        assert len(attention._forward_pre_hooks) == len(attention._forward_hooks) == len(ends) == 1


def refusals(axis: Axis) -> None:
    """Told by name, before anything is changed."""
    from transformers import BloomConfig, GPT2Config, LlamaConfig

    def llama(heads: int, shared: int) -> Any:
        return LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=heads, num_key_value_heads=shared,
        )  # fmt: skip

    exact = BloomConfig(
        vocab_size=VOCABULARY, hidden_size=24, n_layer=1, n_head=4, pretraining_tp=2, slow_but_exact=True
    )
    crossed = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=4, add_cross_attention=True)
    odd = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=3)
    for config, message in (
        (
            llama(3, 1),
            r"module 'model.layers.0.self_attn.q_proj' \(column_heads:8\): 3 heads cannot be shared",
        ),
        (
            llama(12, 3),
            r"module 'model.layers.0.self_attn.k_proj' \(column_heads:2\): 3 heads cannot be shared",
        ),
        (llama(2, 1), r"o_proj' \(row_heads:12\) sums over 2 heads, fewer than the 4 .* use at most 2 ranks"),
        (odd, r"module 'transformer.h.0.attn.c_proj' \(row_heads:8\): 3 heads .* use 1, 3 or 6 ranks"),
        (exact, "pretraining_tp=2 and slow_but_exact=True"),
        (crossed, "gpt2 with add_cross_attention=True"),
    ):
        model, original = build(config, torch.float32), build(config, torch.float32)
        with pytest.raises(ValueError, match=message):
            parallelize(model, "auto", axis)
        assert_same_module(model, original)
        with pytest.raises(ValueError, match="parallelize has split nothing in it"):
            gather(model, axis)


def drops_rightly(config: Any, mesh: Mesh) -> None:
    """Heads of different ranks are dropped apart, what all ranks hold alike, replicas apart; recomputed the same."""
    config.update(
        {name: 0.4 for name in vars(config) if re.fullmatch(r".*_(dropout|pdrop)|attention_dropout", name)}
    )
    streams = RandomStreams({"replicated": (mesh.dp,)})
    split = parallelize(build(config, torch.float64), "auto", mesh.tp)
    dropped: list[Tensor] = []
    attention = next(m for path, m in split.named_modules() if path.endswith((".attn", "attention", "_attn")))
    attention.register_forward_hook(lambda _, __, output: dropped.append(output[1].detach() == 0))
    results: list[list[Tensor]] = []
    for recompute in (False, False, True):
        if recompute:
            split.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        streams.seed(3, "replicated")
        _, logits = step(split)
        state = torch.get_rng_state()
        step(split)  # goes on behind what was drawn
        results.append([logits, state, *(p.grad for p in split.parameters() if p.grad is not None)])
    assert len(dropped) >= 4
    assert len(results[0]) == 2 + len(list(split.parameters()))
    assert not torch.equal(dropped[0], dropped[1])
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))
    apart = comm.all_gather(dropped[0].unsqueeze(0).to(torch.uint8), mesh.world)
    pairs = [torch.equal(apart[i], apart[j]) for i in range(4) for j in range(i)]
    assert not any(pairs), "heads of other ranks and replicas have masks of their own"
    for value in (results[0][0], results[0][1]):
        copies = comm.all_gather(value.unsqueeze(0), mesh.world)
        assert torch.equal(copies[0], copies[1])
        assert torch.equal(copies[2], copies[3])
        assert not torch.equal(copies[0], copies[2])
    sum_partial_gradients(split.parameters())
    for parameter in split.parameters():
        if not sharding_of(parameter).splits:
            assert parameter.grad is not None
            assert torch.equal(comm.broadcast(parameter.grad.clone(), mesh.tp), parameter.grad)
    split.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(step_in_evaluation(split), step_in_evaluation(split))
    assert torch.equal(torch.get_rng_state(), state)


def step_in_evaluation(model: nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=torch.arange(8).view(2, 4)).logits
    return logits


@pytest.mark.timeout(240)
@pytest.mark.ranks(4, timeout=230, imports=TRANSFORMERS)
def test_public_models() -> None:
    """In one run, since importing transformers takes as long as what is done with it."""
    pairs, four = Mesh(dp=2, tp=2), Mesh(tp=4).tp
    for attention, dtype in (("eager", torch.float64), ("sdpa", torch.float32)):
        for config in configs(attention):
            for axis in (pairs.tp, four):
                trains_alike(config, axis, dtype)
    for config in more_configs():
        # These norms round to float32, whatever they are given, so sums over ranks are not those of one process.
        rounds = config.model_type in ("qwen3", "gemma3_text")
        computes_alike(config, pairs.tp, torch.float32 if rounds else torch.float64)
        if config.model_type in ("qwen3", "phi"):  # norms of key heads that ranks share
            computes_alike(config, four, torch.float32)
        forks(config, pairs.tp)
    refusals(four)
    for config in configs("eager"):
        drops_rightly(config, pairs)
