"""Verifying a layout: right ones are equal in float64, and each of the classic mistakes is named with its place.

The mistakes are planted in the ranks of a test, by replacing one function of the product while the layout is built
and trained. One process' values come from before that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.launcher.tests.commands import SHORT, run, run_fresh, start_joined
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, counts_here, set_sharding, sharding_of
from shardweave.comm.testing import run_ranks
from shardweave.launcher import assembly
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.layout import Layout, layout_of
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config
from shardweave.launcher.request import Request
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.verify.capture import share
from shardweave.launcher.verify.difference import Difference, largest_difference
from shardweave.launcher.verify.explanation import factor_remark, norm_remark, sample_remark
from shardweave.launcher.verify.layout import capture_reference, verify_layout, verify_rank
from shardweave.launcher.verify.places import KINDS
from shardweave.launcher.verify.question import ask
from shardweave.launcher.verify.report import Parting, Report
from shardweave.models import Source, StepRouters, Transformer, TransformerConfig
from shardweave.pipeline.actions import Action
from shardweave.pipeline.mailbox import Mailbox
from shardweave.tensor_parallel import RowParallelLinear
from shardweave.zero import LossScale
from shardweave.zero import norm as zero_norm

SMALL = (
    "precision=fp64", "model.layers=4", "model.hidden=16", "model.heads=4", "model.sequence=8", "model.vocab=257",
    "batch.global=4", "batch.micro=1", "optimizer.warmup=1", "optimizer.lr=1e-2", f"data.source={SHORT}",
)  # fmt: skip
LLAMA = (
    "model.position=rotary", "model.norm=rmsnorm", "model.activation=swiglu", "model.embedding_norm=false",
    "model.tie_embeddings=false", "model.ffn=20", "model.qk_norm=true",
)  # fmt: skip
GPT = (
    "model.position=learned", "model.embedding_norm=false", "model.dropout=0.2", "model.attention_dropout=0.1",
)  # fmt: skip
CHUNKED = ("batch.chunked_loss=true",)
EXPERTS = ("model.experts=4", "model.z_loss=0.01", "model.router_bias=0.02", "model.balance_loss=0.1")
EIGHT = ("model.hidden=32", "model.heads=8", "model.kv_heads=4")

LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [()],
    3: [
        ("parallel.data=3", "zero.stage=2", "batch.global=6", *LLAMA),
        ("parallel.pipeline=3", "parallel.schedule=gpipe", "zero.stage=0"),
    ],
    4: [
        ("parallel.data=2", "parallel.pipeline=2", "parallel.schedule=gpipe", *LLAMA),
        ("parallel.tensor=4", "parallel.sequence=false", "zero.stage=0", "model.kv_heads=2", *LLAMA),
        (
            "parallel.tensor=4",
            "parallel.keep_inputs=true",
            "model.kv_heads=2",
            "zero.stage=0",
            *CHUNKED,
            *GPT,
        ),
        ("parallel.data=4", "zero.stage=2", "batch.global=8", *GPT),
        (
            "parallel.data=2",
            "parallel.tensor=2",
            "zero.stage=3",
            "zero.prefetch=2",
            "zero.keep_gathered=5000",
            *CHUNKED,
        ),
        ("parallel.pipeline=4", "optimizer.name=sgd", "optimizer.clip=null"),
        # Both ends of the model on one rank, which shares a tied embedding, and a backward in halves.
        ("parallel.data=2", "parallel.pipeline=2", "parallel.schedule=zb-v", "zero.stage=3", *CHUNKED),
        ("parallel.context=4", "zero.stage=3", *CHUNKED, *LLAMA),
        ("parallel.expert=2", "parallel.tensor=2", "zero.stage=3", *LLAMA, *EXPERTS),
        ("parallel.expert=2", "parallel.pipeline=2", "model.expert_capacity=1.0", *EXPERTS),
        ("parallel.context=2", "parallel.context_form=all-to-all", "parallel.tensor=2", "zero.stage=1", *GPT),
    ],
    8: [
        (
            "parallel.data=2",
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "zero.stage=3",
            "model.layers=5",
            *GPT,
        ),
        ("parallel.tensor=8", "parallel.decomposed=true", *EIGHT, *LLAMA),
    ],
}
"""Layouts by their number of ranks, as overrides of the small run."""

TWO_BY_TWO = ("parallel.tensor=2", "parallel.pipeline=2")
SPREAD = ("parallel.expert=2", "parallel.tensor=2", "model.layers=2", *EXPERTS)
REPLICATED = ("parallel.data=2", "parallel.pipeline=2", "zero.stage=2")


def _config(*overrides: str) -> Config:
    return load_config(None, [*SMALL, *overrides])


def _mesh(config: Config) -> Mesh:
    return mesh_of(config, layout_of(config))


def verified(layouts: Sequence[tuple[str, ...]]) -> list[Report]:
    """Each layout's report, on the same ranks one after the other."""
    reports = []
    for overrides in layouts:
        config = _config(*overrides)
        mesh = _mesh(config)
        reports.append(verify_layout(config, mesh, 2))
        mesh.close()
    return reports


@pytest.mark.parametrize("ranks", sorted(LAYOUTS))
def test_right_layouts_are_equal(ranks: int) -> None:
    answers = run_ranks(verified, ranks, LAYOUTS[ranks], timeout=150)
    for overrides, report in zip(LAYOUTS[ranks], answers[0], strict=True):
        assert report.equal, f"{overrides}: {report.headline()}"
        assert report.headline().startswith("equal: ")
        assert report.trivial == (ranks == 1)
        assert {"start", "hidden", "loss", "gradient", "norm", "parameter"} <= {
            d.kind for d in report.largest
        }
        # Far below the tolerance, which is far below any mistake.
        assert all(difference.relative < 1e-11 for difference in report.largest)
    assert all(answer == answers[0] for answer in answers)


def overflowing() -> tuple[Report, list[bool]]:
    """float16 from a loss scale at which the first steps overflow; with it, whether one process' norms were finite."""
    config = _config("precision=fp16", "parallel.tensor=2")
    mesh = _mesh(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "LossScale", lambda: LossScale(initial=2.0**24))
        capture = capture_reference(config, 2) if mesh.world.is_first else None
        capture = share(capture, config, mesh, torch.device("cpu"), 2)
        report = verify_rank(config, mesh, capture)
    mesh.close()
    return report, [math.isfinite(step.norm) for step in capture.steps]


def test_steps_that_all_skip_are_equal() -> None:
    report, finite = run_ranks(overflowing, 2, timeout=100)[0]
    assert not any(finite)
    assert report.equal, report.headline()
    assert {difference.kind for difference in report.largest} == {"start", "hidden", "loss", "parameter"}


# --- mistakes ------------------------------------------------------------------------------------------------------


def missing_reduction(patch: pytest.MonkeyPatch) -> None:
    """A norm's weight under sequence parallelism forgets that its gradient is one summand."""

    def build(*arguments: Any, **keywords: Any) -> Transformer:
        module = Transformer(*arguments, **keywords)
        for parameter in module.parameters():
            record = sharding_of(parameter)
            if record.name == "layers.1.attention_norm.weight":
                set_sharding(parameter, replace(record, partial=()))
        return module

    patch.setattr(assembly, "Transformer", build)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Every tensor rank counts its copy of a norm's weight."""

    def counts(parameter: Tensor, model: Axis) -> bool:
        return sharding_of(parameter).name == "layers.1.mlp_norm.weight" or counts_here(parameter, model)

    patch.setattr(zero_norm, "counts_here", counts)


def stale_copy(patch: pytest.MonkeyPatch) -> None:
    """The head's copy of the embedding is not updated."""
    right = Trainer.train_step

    def step(self: Trainer) -> Any:
        copies = [copy for _, copy in self.parts.modules[0].tied_parameters() if self.mesh.pp.is_last]
        before = [copy.detach().clone() for copy in copies]
        result = right(self)
        for copy, values in zip(copies, before, strict=True):
            copy.data.copy_(values)
        return result

    patch.setattr(Trainer, "train_step", step)


def bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """A row-parallel layer adds its bias before the sum over the ranks instead of after it."""
    right = RowParallelLinear.forward

    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        y = right(self, x)
        if sharding_of(self.weight).name != "layers.1.attention.output.weight" or self.bias is None:
            return y
        return y + (self.axis.size - 1) * self.bias

    patch.setattr(RowParallelLinear, "forward", forward)


def wrong_denominator(patch: pytest.MonkeyPatch) -> None:
    """The loss is divided by this replica's tokens, not by everybody's."""
    patch.setattr(Trainer, "_sum", lambda self, count: count)


def swapped_messages(patch: pytest.MonkeyPatch) -> None:
    """The first stage sends the first two micro-batches' hidden states under each other's name."""
    right = Mailbox._tag

    def tag(self: Mailbox, action: Action, part: int) -> int:
        if action.kind == "F" and action.micro_batch < 2 and self._axis.is_first:
            action = Action("F", action.stage, 1 - action.micro_batch)
        return right(self, action, part)

    patch.setattr(Mailbox, "_tag", tag)


def other_start(patch: pytest.MonkeyPatch) -> None:
    """An element of the second rank's slice of a parameter starts elsewhere."""

    right = assembly.source_of

    def wrong(config: Config, shape: TransformerConfig) -> Source:
        source = right(config, shape)

        def fill(parameter: nn.Parameter) -> None:
            source(parameter)
            record = sharding_of(parameter)
            if record.name == "layers.0.attention.query.weight" and record.splits[0].offset:
                parameter[2, 3] += 1e-3

        return fill

    patch.setattr(assembly, "source_of", wrong)


def routers_of_one_replica(patch: pytest.MonkeyPatch) -> None:
    """The routers' losses are means over this replica's sequences, not over everybody's."""

    def routers(self: Trainer, loss_scale: float) -> StepRouters:
        shape, mine = self.parts.shape, self.parts.plan.global_batch // self.mesh.dp.size
        return StepRouters(shape, sequences=mine, tokens=mine * shape.sequence, scale=loss_scale)

    patch.setattr(Trainer, "_routers", routers)


MISTAKES: tuple[tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]], ...] = (
    (missing_reduction, TWO_BY_TWO),
    (counted_twice, TWO_BY_TWO),
    (stale_copy, TWO_BY_TWO),
    (bias_on_every_rank, TWO_BY_TWO),
    (swapped_messages, TWO_BY_TWO),
    (other_start, TWO_BY_TWO),
    (routers_of_one_replica, SPREAD),
    (wrong_denominator, REPLICATED),
    (swapped_messages, REPLICATED),
)


@contextmanager
def _planted(plant: Callable[[pytest.MonkeyPatch], None] | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield


def with_mistakes() -> list[Report]:
    """A report for each mistake, then one for each layout without any."""
    reports = []
    captures = {}
    for plant, overrides in (*MISTAKES, (None, TWO_BY_TWO), (None, REPLICATED)):
        config = _config(*overrides)
        mesh = _mesh(config)
        if overrides not in captures:
            capture = capture_reference(config, 2) if mesh.world.is_first else None
            captures[overrides] = share(capture, config, mesh, torch.device("cpu"), 2)
        with _planted(plant):
            reports.append(verify_rank(config, mesh, captures[overrides]))
        mesh.close()
    return reports


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, bool], Report]:
    """What was found, by the mistake's name and whether the layout had replicas."""
    reports = run_ranks(with_mistakes, 4, timeout=170)[0]
    names = [(plant.__name__, overrides is REPLICATED) for plant, overrides in MISTAKES]
    return dict(zip([*names, ("", False), ("", True)], reports, strict=True))


def _place(report: Report) -> tuple[int, str, str, tuple[int, ...]]:
    assert report.first is not None, report.headline()
    difference = report.first.difference
    return difference.step, difference.kind, difference.name, report.first.ranks


def test_without_a_mistake_they_are_equal(found: dict[tuple[str, bool], Report]) -> None:
    for replicas in (False, True):
        report = found["", replicas]
        assert report.equal, report.headline()
        assert max(difference.relative for difference in report.largest) < 1e-11


def test_a_missing_reduction(found: dict[tuple[str, bool], Report]) -> None:
    report = found["missing_reduction", False]
    assert _place(report) == (1, "gradient", "layers.1.attention_norm.weight", (0, 1))
    assert "on rank " in report.headline()
    assert "(pp0 dp0 tp" in report.headline()
    assert "its record says: whole on every tensor rank, no sum over them" in report.headline()


def test_a_parameter_counted_twice_in_the_norm(found: dict[tuple[str, bool], Report]) -> None:
    report = found["counted_twice", False]
    assert _place(report) == (1, "norm", "", (0, 1, 2, 3))
    assert "if layers.1.mlp_norm.weight is counted twice" in report.headline()


def test_routers_that_see_one_replica(found: dict[tuple[str, bool], Report]) -> None:
    report = found["routers_of_one_replica", False]
    assert _place(report) == (1, "gradient", "layers.1.mlp.router.weight", (0, 1))  # who has the shard
    assert "(pp0 dp0 ep0 tp" in report.headline()


def test_a_stale_tied_copy(found: dict[tuple[str, bool], Report]) -> None:
    report = found["stale_copy", False]
    assert _place(report) == (1, "parameter", "embedding.weight", (2, 3))
    assert "it is tied over 2 stages" in report.headline()


def test_a_bias_added_on_every_rank(found: dict[tuple[str, bool], Report]) -> None:
    report = found["bias_on_every_rank", False]
    # Biases start at zero: the first trace of it is the bias' own gradient.
    assert _place(report) == (1, "gradient", "layers.1.attention.output.bias", (0, 1))
    assert "it is 2 times the right one everywhere" in report.headline()


def test_a_wrong_loss_denominator(found: dict[tuple[str, bool], Report]) -> None:
    report = found["wrong_denominator", True]
    assert _place(report) == (1, "loss", "", (0, 1, 2, 3))
    assert "it is 2 times the right one" in report.headline()


@pytest.mark.parametrize("replicas", [False, True])
def test_a_swapped_pair_of_messages(found: dict[tuple[str, bool], Report], replicas: bool) -> None:
    report = found["swapped_messages", replicas]
    step, kind, name, ranks = _place(report)
    assert (step, kind, ranks) == (1, "received", (2, 3))
    assert name == "layers.2"
    assert "messages were swapped" in report.headline()
    assert "what arrived from layers.2 at step 1" in report.headline()


def test_another_start(found: dict[tuple[str, bool], Report]) -> None:
    report = found["other_start", False]
    assert _place(report) == (0, "start", "layers.0.attention.query.weight", (1,))
    assert "at [10, 3]" in report.headline()  # row 2 of the slice that begins at row 8
    assert "before the first step" in report.headline()


# --- the parts -----------------------------------------------------------------------------------------------------


def test_differences_of_numbers_that_are_none() -> None:
    nan, inf, one = math.nan, math.inf, torch.ones(())
    assert largest_difference(torch.tensor([nan, inf, 0.0]), torch.tensor([nan, inf, 0.0]), one) == (0.0, 0)
    assert largest_difference(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0]), one) == (inf, 1)
    assert largest_difference(torch.tensor([1.0, inf]), torch.tensor([1.0, -inf]), one) == (inf, 1)
    assert largest_difference(torch.zeros(2), torch.zeros(2), torch.zeros(())) == (0.0, 0)
    assert largest_difference(torch.tensor([0.0, 1e-30]), torch.zeros(2), torch.zeros(())) == (inf, 1)
    assert largest_difference(
        torch.tensor([3.0, 5.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 6.0])
    ) == (1.0, 0)
    assert largest_difference(torch.zeros(0), torch.zeros(0), one) == (0.0, 0)


def test_a_factor_is_seen_only_where_it_holds_everywhere() -> None:
    right = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert factor_remark(0.5 * right, right, 3.0, 1e-9) == "it is 0.5 times the right one everywhere"
    assert factor_remark(0.0 * right, right, 3.0, 1e-9) == "it is zero everywhere"
    assert factor_remark(right + 1.0, right, 3.0, 1e-9) == ""
    assert factor_remark(right, 0.0 * right, 3.0, 1e-9) == ""
    assert factor_remark(right * math.nan, right, 3.0, 1e-9) == ""


def test_swapped_samples_are_recognised() -> None:
    right = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    remark = sample_remark(right[2], right, [70, 80, 90], 70, 1e-9)
    assert remark == "sample 70 has the values of sample 90: messages were swapped"
    assert sample_remark(right[2] + 1, right, [70, 80, 90], 70, 1e-9) == ""


def test_a_norm_is_explained_by_what_was_counted_wrongly() -> None:
    gradients = {
        "embedding.weight": torch.tensor([3.0, 1.0]),
        "layers.0.mlp.up.bias": torch.tensor([2.0]),
        "layers.1.mlp.up.bias": torch.tensor([0.5]),
    }
    total = 10.0 + 4.0 + 0.25

    def remark(square: float) -> str:
        return norm_remark(math.sqrt(square), math.sqrt(total), gradients, 1e-9)

    assert remark(total + 10.0).endswith("if embedding.weight is counted twice")
    assert remark(total + 3 * 0.25).endswith("if layers.1.mlp.up.bias is counted 4 times")
    assert remark(total - 4.0).endswith("if layers.0.mlp.up.bias is left out")
    assert remark(total + 4.25).endswith("if layers.*.mlp.up.bias is counted twice")
    assert "no single parameter" in remark(total + 5.1)


def _difference(kind: Any, **fields: Any) -> Difference:
    return replace(Difference(kind, 1, "", 0, 0.0, 1e-9), **fields)


def test_a_report_survives_json_and_knows_its_coordinates() -> None:
    first = Parting(
        _difference("gradient", name="norm.bias", rank=5, relative=math.inf, ours=math.nan, index=(3,), remark="why"),
        (4, 5),
    )  # fmt: skip
    largest = tuple(_difference(kind) for kind in KINDS)
    report = Report(Layout(data=2, tensor=2, pipeline=2), "fp64", 3, largest, (first,))
    text = json.dumps(report.plain(), allow_nan=False)
    again = Report.of(json.loads(text))
    assert (again.layout, again.steps, again.equal) == (report.layout, 3, False)
    assert again.first is not None
    assert again.first.difference.relative == math.inf
    assert math.isnan(again.first.difference.ours)
    assert json.loads(text)["partings"][0]["coordinates"] == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}
    headline = report.headline()
    assert headline.startswith("parts in the gradient of norm.bias at step 1: nan for nan at [3], inf apart")
    assert headline.endswith("on rank 5 (pp1 dp0 tp1) and 1 more: ranks 4, 5; why")


def test_configurations_that_cannot_run_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        ask(Request.of(["parallel.tensor=3"]))
    with pytest.raises(ConfigError, match="is not a multiple of"):
        ask(Request.of(["parallel.tensor=2"]), world_size=3)
    question = ask(Request.of(["model.preset=gpt2", "parallel.tensor=2", "precision=bf16"]), steps=4)
    assert (question.config.precision, question.steps, question.config.checkpoint.every) == ("fp64", 4, 0)
    assert question.plain_changes()[0]["setting"] == "model.layers"
    assert ask(Request.of(["precision=bf16"]), float64=False).config.precision == "bf16"


# --- the command ---------------------------------------------------------------------------------------------------

TINY = tuple(override for override in SMALL if not override.startswith("precision"))


@pytest.mark.timeout(400)
def test_the_command_says_where_they_part(tmp_path: Path) -> None:
    # Gradients that travel in bfloat16 are no mistake, but not one process' float32 either: another training run.
    rounded = (*TINY, "parallel.data=2", "zero.reduce_dtype=bf16")
    status, out, err = run_fresh(
        tmp_path, "verify", *rounded, "--precision", "configured", "--json", "--steps", "1"
    )
    assert status == 4, err
    answer = json.loads(out)
    first = answer["partings"][0]
    assert (answer["equal"], answer["ranks"], answer["precision"], answer["steps"]) == (False, 2, "fp32", 1)
    assert (first["kind"], first["step"]) == ("gradient", 1)
    assert first["coordinates"]["dp"] == first["rank"]
    assert first["name"] in answer["headline"]
    # In float64 they travel whole, and the command says so.
    status, out, err = run(tmp_path, "verify", *rounded)
    assert (status, err) == (0, "")
    assert "zero.reduce_dtype bf16 -> auto (rounding must not hide a mistake)" in out
    assert out.splitlines()[-1] == "equal: dp2 × tp1 × pp1 trains as one process does"
    assert list(tmp_path.iterdir()) == []
    status, _, err = run(tmp_path, "verify", "parallel.tensor=3")
    assert status == 2
    assert err.startswith("error: command line: `parallel.tensor: 3` does not divide")


@pytest.mark.timeout(200)
def test_ranks_that_something_else_started_verify_together(tmp_path: Path) -> None:
    with start_joined(tmp_path, 2, "verify", *TINY, "parallel.tensor=2", "--json") as ranks:
        ended = [rank.end() for rank in ranks]
    assert [status for status, _, _ in ended] == [0, 0], ended
    answer = json.loads("".join(out for _, out, _ in ended))  # one of them answers
    assert (answer["equal"], answer["ranks"], answer["layout"]["tp"]) == (True, 2, 2)
    assert answer["changed"] == [
        {"setting": "precision", "from": "fp32", "to": "fp64", "reason": "rounding must not hide a mistake"}
    ]
