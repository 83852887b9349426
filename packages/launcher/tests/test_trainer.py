"""Training steps on several ranks against one process, and what every layout must report alike.

The sweep over all layouts is in integration_tests; here are the cases that are about the trainer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardweave.comm import Axis, Links, Mesh, all_gather
from shardweave.launcher import assembly
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import IGNORED, Dataset, MicroBatch
from shardweave.launcher.meter import Meter
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Record, StepResult, Trainer, train_in_process
from shardweave.models import RouterStatistics
from shardweave.zero import LossScale

SETTINGS = [
    "precision=fp64",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.sequence=8",
    "batch.global=8",
    "batch.micro=1",
    "optimizer.warmup=1",
    "optimizer.lr=1e-2",
    "run.steps=10",
]


def _config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def _dataset(samples: int = 40, validation: int = 0) -> Dataset:
    tokens = np.random.default_rng(5).integers(1, 256, 8 * samples + 1).astype(np.uint8)
    return Dataset.of_tokens(tokens, 8, validation / samples)


def _same(record: Record, reference: Record) -> None:
    assert record.losses == pytest.approx(reference.losses, rel=1e-9)
    assert record.grad_norms == pytest.approx(reference.grad_norms, rel=1e-9)
    assert record.parameters.keys() == reference.parameters.keys()
    for name, values in reference.parameters.items():
        # A key bias has no gradient in theory: what Adam makes of the rounding noise there is below 1e-11.
        tolerance = max(1e-9 * float(values.abs().max()), 1e-11)
        torch.testing.assert_close(record.parameters[name], values, rtol=0, atol=tolerance, msg=name)


def test_a_run_repeats_itself_and_the_seed_matters() -> None:
    first, again = (train_in_process(_config(), Mesh(), 3, dataset=_dataset()) for _ in range(2))
    assert first.losses == again.losses
    other = train_in_process(_config("run.seed=7"), Mesh(), 3, dataset=_dataset())
    assert first.losses[0] != other.losses[0]
    assert first.losses[0] == pytest.approx(np.log(256), abs=1.0)


def test_the_steps_of_a_run_do_not_depend_on_the_micro_batch_or_on_evaluations() -> None:
    reference = train_in_process(_config(), Mesh(), 3, dataset=_dataset())
    _same(train_in_process(_config("batch.micro=4"), Mesh(), 3, dataset=_dataset()), reference)
    trainer = Trainer(_config(), Mesh(), dataset=_dataset(44, validation=4))
    losses = []
    for _ in range(3):
        trainer.evaluate()
        losses.append(trainer.train_step().loss)
    assert losses == pytest.approx(reference.losses, rel=1e-9)


@pytest.mark.ranks(4, timeout=120)
def test_b123_reports_and_parameters_are_those_of_one_process_in_every_layout() -> None:
    for schedule, dropout in (("1f1b", "0.0"), ("gpipe", "0.2")):
        drop = [f"model.dropout={dropout}", f"model.attention_dropout={dropout}"]
        config = _config(f"parallel.schedule={schedule}", *drop)
        reference = Trainer(config, Mesh.single(), dataset=_dataset(44, 4))
        expected = [reference.train_step() for _ in range(2)]
        for sizes in ({"dp": 4}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}):
            mesh = Mesh.of(sizes)
            trainer = Trainer(config, mesh, dataset=_dataset(44, 4))
            results = [trainer.train_step() for _ in range(2)]
            for got, want in zip(results, expected, strict=True):
                _same_step(got, want)
            assert trainer.parameter_norm() == pytest.approx(reference.parameter_norm(), rel=1e-9)
            assert trainer.parameter_count() == reference.parameter_count()
            assert _evaluation(trainer) == pytest.approx(_evaluation(reference), rel=1e-9)
            mesh.close()


EXPERTS = (
    "model.experts=4", "model.ffn=12", "model.z_loss=0.02", "model.balance_loss=0.1", "model.router_bias=0.01",
)  # fmt: skip


@pytest.mark.ranks(4, timeout=120)
def test_routers_report_what_they_do_in_one_process() -> None:
    for overrides in (
        ["model.expert_capacity=0.75", "model.experts_per_token=1"],
        ["model.activation=swiglu"],
    ):
        config = _config(*EXPERTS, *overrides)
        reference = Trainer(config, Mesh.single(), dataset=_dataset(44, 4))
        # An odd number of steps: a bias that went up and then down is back at 0.
        expected = [reference.train_step() for _ in range(3)]
        for sizes, stage in (
            ({"dp": 4, "ep": 4}, 3),
            ({"dp": 4, "ep": 2, "replicas": 2}, 1),
            ({"dp": 2, "ep": 2, "tp": 2}, 2),
            ({"dp": 2, "ep": 2, "pp": 2}, 3),
        ):
            mesh = Mesh.of(sizes)
            more = _config(
                *EXPERTS, *overrides, f"zero.stage={stage}", f"zero.replicas={sizes.get('replicas', 1)}"
            )
            trainer = Trainer(more, mesh, dataset=_dataset(44, 4))
            results = [trainer.train_step() for _ in range(3)]
            for got, want in zip(results, expected, strict=True):
                _same_step(got, want)
                _same_routers(got.routers, want.routers)
            assert trainer.parameter_norm() == pytest.approx(reference.parameter_norm(), rel=1e-9)
            assert trainer.parameter_count() == reference.parameter_count()
            assert _evaluation(trainer) == pytest.approx(_evaluation(reference), rel=1e-9)
            for name, bias in trainer.parts.buffers().items():
                assert torch.equal(bias, reference.parts.modules[0].get_buffer(name)), name
                assert bias.abs().max() > 0
            mesh.close()


@pytest.mark.ranks(4, timeout=120)
def test_experts_in_narrow_formats_train_and_their_losses_have_the_scale() -> None:
    """The routers' losses weigh so much that a norm without them, or with them unscaled, is far off."""
    heavy = (*EXPERTS, "model.balance_loss=30", "model.z_loss=10", "zero.stage=3", "optimizer.lr=1e-4")
    expected = Trainer(_config(*heavy), Mesh.single(), dataset=_dataset())
    want = [expected.train_step() for _ in range(2)]
    plain = [value.replace("=30", "=0").replace("=10", "=0") for value in heavy]
    without = Trainer(_config(*plain), Mesh.single(), dataset=_dataset()).train_step().grad_norm
    assert want[0].grad_norm > 2 * without
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 0.1), ("fp16", 0.02)):
        mesh = Mesh(dp=2, ep=2, tp=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly, "LossScale", lambda: LossScale(initial=2.0**8))
            trainer = Trainer(_config(*heavy, f"precision={precision}"), mesh, dataset=_dataset())
        got = [trainer.train_step() for _ in range(2)]
        mesh.close()
        for mine, right in zip(got, want, strict=True):
            assert not mine.skipped, precision
            assert mine.loss == pytest.approx(right.loss, rel=tolerance), precision
            assert mine.grad_norm == pytest.approx(right.grad_norm, rel=tolerance), precision


def _same_routers(got: RouterStatistics | None, want: RouterStatistics | None) -> None:
    assert got is not None
    assert want is not None
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.dropped, want.dropped)
    assert got.loss == pytest.approx(want.loss, rel=1e-9)
    torch.testing.assert_close(got.balance_loss, want.balance_loss, rtol=1e-9, atol=0)


def test_a_step_that_is_skipped_moves_no_bias_and_metrics_say_what_routers_do() -> None:
    trainer = Trainer(_config(*EXPERTS), Mesh(), dataset=_dataset())
    record = _metrics_of_a_step(trainer)
    assert record["expert_load"] >= 1.0
    assert record["dropped_share"] == 0.0
    weighted = 0.1 * record["balance_loss"] + 0.02 * record["z_loss"]
    assert record["auxiliary_loss"] == pytest.approx(2 * weighted, rel=1e-9)  # of two layers
    bias = trainer.parts.modules[0].get_buffer("layers.0.mlp.router.bias")
    before = bias.clone()
    with torch.no_grad():
        trainer.parts.modules[0].get_parameter("norm.weight")[0] = torch.nan
    assert trainer.train_step().skipped
    assert torch.equal(bias, before)
    assert "expert_load" not in _metrics_of_a_step(Trainer(_config(), Mesh(), dataset=_dataset()))


@pytest.mark.ranks(2)
def test_metrics_have_the_heads_z_loss_apart() -> None:
    """Under its own key, without its factor, and not in the loss."""
    plain = Trainer(_config(), Mesh.single(), dataset=_dataset())
    with torch.no_grad():
        module = plain.parts.modules[0]
        squares = [
            module.gather_logits(module(batch.inputs)).logsumexp(-1).square() for batch in plain.batches.at(0)
        ]
    mean = float(torch.cat(squares, dim=1).mean())
    right = _metrics_of_a_step(plain)
    assert "head_z_loss" not in right
    for mesh in (Mesh.single(), Mesh(dp=2), Mesh(tp=2), Mesh(pp=2)):
        trainer = Trainer(_config("model.head_z_loss=0.5"), mesh, dataset=_dataset())
        record = _metrics_of_a_step(trainer)
        assert record["loss"] == pytest.approx(right["loss"], rel=1e-12)
        assert record["head_z_loss"] == pytest.approx(mean, rel=1e-9)
        assert record["grad_norm"] > 1.05 * right["grad_norm"]  # it is trained on
        mesh.close()


def _metrics_of_a_step(trainer: Trainer) -> dict[str, Any]:
    return Meter(trainer).stop(trainer.train_step()).record()


@pytest.mark.ranks(2)
def test_products_in_pieces_are_decided_by_what_is_measured() -> None:
    """``auto`` measures the links of the tensor axis where nobody has, and the products; but nothing on a CPU."""
    config, mesh = _config("parallel.tensor=2", "parallel.decomposed=auto"), Mesh(tp=2)
    assert Trainer(config, mesh, dataset=_dataset(8, 0)).parts.modules[0].decomposed is False
    asked: list[Links] = []

    def overlap(axis: Axis, links: Links, *, device: torch.device, dtype: torch.dtype) -> bool:
        assert (axis, device.type, dtype) == (mesh.tp, "cuda", torch.bfloat16)
        asked.append(links)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "overlap_for", overlap)
        assert assembly._decomposed(config, mesh, torch.device("cuda"), torch.bfloat16) is True
        split = _config("parallel.tensor=2", "parallel.decomposed=auto", "parallel.sequence=false")
        assert assembly._decomposed(split, mesh, torch.device("cuda"), torch.bfloat16) is False
    assert [links.measured for links in asked] == [("node",)]


@pytest.mark.ranks(4, timeout=120)
def test_b083_evaluations_that_do_not_divide_at_every_stage() -> None:
    """Five batches on four replicas, and fewer batches than replicas: at stage 3 all take part in each forward."""
    for validation in (5, 3):
        dataset = _dataset(44, validation)
        reference = _evaluation(Trainer(_config("batch.micro=1"), Mesh.single(), dataset=dataset))
        for stage in range(4):
            mesh = Mesh(dp=4)
            chunked = f"batch.chunked_loss={'true' if stage % 2 else 'false'}"
            config = _config("batch.micro=1", f"zero.stage={stage}", chunked)
            trainer = Trainer(config, mesh, dataset=dataset)
            assert _evaluation(trainer) == pytest.approx(reference, rel=1e-9)
            trainer.train_step()
            mesh.close()


def _evaluation(trainer: Trainer) -> tuple[float, ...]:
    """Everything that an evaluation says, in numbers."""
    found = trainer.evaluate()
    assert found is not None
    assert found.bits_per_byte is not None
    return found.loss, found.bits_per_byte, float(found.tokens), *found.losses.values()


def _same_step(got: StepResult, want: StepResult) -> None:
    assert got.loss == pytest.approx(want.loss, rel=1e-9)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-9)
    assert (got.step, got.tokens, got.lr, got.skipped) == (want.step, want.tokens, want.lr, want.skipped)


class _Masked:
    """Batches whose labels are ignored by sample: `valid[i]` labels of sample i count."""

    def __init__(self, valid: Sequence[int], rank: int, ranks: int, accumulation: int) -> None:
        self.valid, self.rank, self.ranks, self.accumulation = valid, rank, ranks, accumulation

    def at(self, visit: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(1, 256, (len(self.valid), 9), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for sample, count in enumerate(self.valid):
            targets[sample, count:] = IGNORED
        samples = torch.arange(len(self.valid))
        mine = samples.reshape(self.accumulation, self.ranks, -1)[:, self.rank]
        return [MicroBatch(chosen, inputs[chosen], targets[chosen]) for chosen in mine]


def _masked(config: Config, mesh: Mesh, valid: Sequence[int]) -> tuple[Trainer, StepResult]:
    trainer = Trainer(config, mesh, dataset=_dataset())
    trainer.batches = _Masked(valid, mesh.dp.rank, mesh.dp.size, trainer.parts.plan.accumulation)
    return trainer, trainer.train_step()


def _compare_masked(mesh: Mesh, valid: Sequence[int], *, micro: int) -> StepResult:
    small = [f"batch.global={len(valid)}", f"batch.micro={micro}", "optimizer.clip=null"]
    trainer, result = _masked(_config(*small), mesh, valid)
    whole = [f"batch.global={len(valid)}", f"batch.micro={len(valid)}", "optimizer.clip=null"]
    reference, expected = _masked(_config(*whole), Mesh.single(), valid)
    _same_step(result, expected)
    assert result.tokens == sum(valid)
    found = trainer.full_parameters()
    for name, values in reference.full_parameters().items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-10, msg=name)
    return result


@pytest.mark.ranks(2, timeout=120)
def test_b015_b017_short_micro_batches_and_ranks_do_not_weigh_more() -> None:
    _compare_masked(Mesh.single(), [3, 1], micro=1)
    for sizes in ({"dp": 2}, {"pp": 2}, {"tp": 2}, {"cp": 2}):
        mesh = Mesh.of(sizes)
        _compare_masked(mesh, [7, 1], micro=1)
        _compare_masked(mesh, [1, 8, 3, 2], micro=1)
        mesh.close()


@pytest.mark.ranks(2, timeout=120)
def test_b019_ranks_micro_batches_and_whole_steps_without_labels() -> None:
    mesh = Mesh(dp=2)
    _compare_masked(mesh, [5, 0], micro=1)  # nothing on rank 1
    _compare_masked(mesh, [5, 3, 0, 2], micro=1)  # one micro-batch of rank 0 is empty
    trainer, result = _masked(_config("batch.global=2"), mesh, [0, 0])
    assert (result.loss, result.tokens, result.grad_norm) == (0.0, 0, 0.0)
    assert all(bool(values.isfinite().all()) for values in trainer.full_parameters().values())
    state = trainer.parts.optimizer.local_state()
    assert all(bool(value.isfinite().all()) for value in state.values() if isinstance(value, torch.Tensor))
    mesh.close()


class _FixedLoss:
    """Stands in for the model's loss: the micro-batch's first sample number decides it, per token."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.values[int(targets[0, 0])] * targets.numel() + 0.0 * logits.sum()


@pytest.mark.ranks(4, timeout=120)
def test_b020_the_reported_loss_is_the_global_mean_on_every_rank() -> None:
    """Two micro-batches with losses 1 and 3 on dp 0, 5 and 7 on dp 1: 4.0, not the last, nor one rank's."""
    for sizes in ({"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}):
        mesh = Mesh.of(sizes)
        trainer = Trainer(_config("batch.global=4"), mesh, dataset=_dataset())
        for stage in trainer.parts.pipeline.stages.values():
            stage._loss = _FixedLoss([1.0, 5.0, 3.0, 7.0])  # visits 0, 1, 2, 3 are dealt 0 | 1 | 0 | 1
        original = trainer.batches

        class Numbered:
            def at(
                self, visit: int, original: object = original, rank: int = mesh.dp.rank
            ) -> list[MicroBatch]:
                batches = original.at(visit)  # type: ignore[attr-defined]
                return [
                    replace(batch, targets=torch.full_like(batch.targets, 2 * number + rank))
                    for number, batch in enumerate(batches)
                ]

        trainer.batches = Numbered()
        assert trainer.train_step().loss == pytest.approx(4.0)
        mesh.close()


@pytest.mark.ranks(8, timeout=120)
def test_b110_a_replica_shares_its_samples_and_replicas_share_none() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    trainer = Trainer(_config("batch.global=16", "batch.micro=2"), mesh, dataset=_dataset())
    ids = torch.cat([batch.samples for batch in trainer.batches.at(0)])
    everyone = all_gather(ids.unsqueeze(0), mesh.world).tolist()
    for rank, samples in enumerate(everyone):
        replica = rank // 2 % 2
        assert samples == everyone[2 * replica]
    assert len(set(everyone[0]) | set(everyone[2])) == 16
    assert not set(everyone[0]) & set(everyone[2])


def test_matrices_decay_and_vectors_do_not() -> None:
    parts = Trainer(_config(), Mesh(), dataset=_dataset()).parts
    decay = {
        id(parameter): group["weight_decay"]
        for group in parts.optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in parts.modules[0].named_parameters():
        assert decay[id(parameter)] == (0.1 if name.endswith("weight") and "norm" not in name else 0.0), name


def test_bf16_trains_and_fp64_stays_fp64() -> None:
    record = train_in_process(_config("precision=bf16"), Mesh(), 6, dataset=_dataset())
    assert record.losses[-1] < record.losses[0]
    assert record.parameters["norm.weight"].dtype == torch.bfloat16
    assert (
        train_in_process(_config(), Mesh(), 1, dataset=_dataset()).parameters["norm.weight"].dtype
        == torch.float64
    )


@pytest.mark.ranks(4, timeout=120)
def test_fp16_trains_alike_in_every_layout_and_the_loss_falls() -> None:
    """Layouts add up in another order, which half a step of fp16, 2^-11, covers; fp32 is as near."""
    config = _config("precision=fp16", "zero.stage=2", "batch.micro=2")
    reference, wide = (
        Trainer(chosen, Mesh.single(), dataset=_dataset())
        for chosen in (config, _config("precision=fp32", "zero.stage=2", "batch.micro=2"))
    )
    expected = [(reference.train_step(), wide.train_step()) for _ in range(8)]
    assert [result.loss_scale for pair in expected for result in pair] == [2.0**16, None] * 8
    assert expected[-1][0].loss < expected[0][0].loss
    for sizes, stage in (({"dp": 2, "tp": 2}, 2), ({"pp": 2, "dp": 2}, 3)):
        mesh = Mesh.of(sizes)
        trainer = Trainer(
            _config("precision=fp16", f"zero.stage={stage}", "batch.micro=2"), mesh, dataset=_dataset()
        )
        assert {parameter.dtype for parameter in trainer.parts.modules[0].parameters()} == {torch.float16}
        for pair in expected:
            got = trainer.train_step()
            assert (got.skipped, got.loss_scale) == (False, 2.0**16)
            for want in pair:
                assert got.loss == pytest.approx(want.loss, rel=2.0**-11)
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=2.0**-11)
        mesh.close()


@pytest.mark.ranks(4, timeout=120)
def test_fp16_finds_its_scale_on_all_ranks_together() -> None:
    """From a scale at which every gradient overflows; what is reported is the loss itself."""
    for sizes, stage in (({"dp": 2, "tp": 2}, 3), ({"pp": 2, "tp": 2}, 2)):
        config = _config("precision=fp16", f"zero.stage={stage}", "batch.micro=2")
        mesh = Mesh.of(sizes)
        trainer = Trainer(config, mesh, dataset=_dataset())
        first = trainer.full_parameters()
        trainer.parts.optimizer.load_loss_scale_state({"scale": 2.0**22, "clean_steps": 0})
        results = [trainer.train_step()]
        while results[-1].skipped:
            assert results[-1].backed_off
            assert all(torch.equal(first[name], now) for name, now in trainer.full_parameters().items())
            results.append(trainer.train_step())
        assert not results[-1].backed_off
        assert 2 < len(results) < 8
        assert trainer.step == len(results)
        for number, result in enumerate(results):
            assert result.loss_scale == 2.0 ** (22 - number)
            assert result.loss == pytest.approx(np.log(256), abs=1.0)
            seen = torch.tensor([float(result.loss_scale or 0)])
            assert len(set(all_gather(seen, mesh.world).tolist())) == 1
        mesh.close()


def test_only_fp16_reports_a_loss_scale() -> None:
    for precision, right in (("fp16", 2.0**16), ("bf16", None)):
        trainer = Trainer(_config(f"precision={precision}"), Mesh(), dataset=_dataset())
        meter = Meter(trainer)
        meter.start()
        record = meter.stop(trainer.train_step()).record()
        assert record.get("loss_scale") == right
        assert ("loss_scale" in record) == (precision == "fp16")


def test_a_gradient_that_is_not_finite_is_skipped_or_stops() -> None:
    trainer = Trainer(_config(), Mesh(), dataset=_dataset())
    before = trainer.full_parameters()
    with torch.no_grad():
        trainer.parts.modules[0].norm.weight[3] = float("nan")
    result = trainer.train_step()
    assert result.skipped
    assert np.isnan(result.loss)
    after = trainer.full_parameters()
    assert torch.equal(before["embedding.weight"], after["embedding.weight"])
    stopping = Trainer(_config("guard.nonfinite=stop"), Mesh(), dataset=_dataset())
    with torch.no_grad():
        stopping.parts.modules[0].norm.weight[3] = float("nan")
    with pytest.raises(FloatingPointError):
        stopping.train_step()
