"""What a run is: one frozen value made of small blocks, one per concern.

The classes are the schema of the YAML file: a key that is not a field is refused, a value of the wrong type is
refused (text where a number belongs, too), and everything has a default. They hold no logic: reading a file is
`reading`, rules between keys are `rules`, what is not built yet is `unbuilt`, and arithmetic over ranks is `layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "Batch",
    "Checkpoint",
    "Comm",
    "Config",
    "Data",
    "Guard",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallel",
    "RecomputeEvery",
    "RecomputeOperations",
    "RotaryScaling",
    "Run",
    "WeightedSource",
    "Zero",
]


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("printable", "text on one line, without control characters")
    return value


def _name(value: str) -> str:
    """Something that is one directory on every file system, and looks like it in a terminal."""
    plain = value.strip(" .") and value == value.strip() and not set(value) & set("/\\")
    if not plain or len(value.encode()) > 200:
        raise PydanticCustomError("name", "a plain name: no slashes, no spaces around it, at most 200 bytes")
    return value


Text = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_printable)]
Prompt = Annotated[str, Strict(), BeforeValidator(lambda value: "" if value is None else value)]
"""Any text, none as well."""
Name = Annotated[Text, AfterValidator(_name)]
Whole = Annotated[int, Strict(), BeforeValidator(_integral)]
"""A whole number; ``1e3`` is one, ``1.5`` and ``"3"`` are not."""
Count = Annotated[Whole, Field(ge=1, le=2**62)]
Size = Annotated[Whole, Field(ge=1, le=10**9)]
"""A count that memory or ranks are made of: what is larger is a slip of the finger, and arithmetic stays quick."""
Ranks = Annotated[Whole, Field(ge=1, le=65_536)]
Natural = Annotated[Whole, Field(ge=0, le=2**62)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Auto = Literal["auto"]
DType = Literal["auto", "fp64", "fp32", "bf16", "fp16"]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """The keys as they are written in the file (``global``, where the field must be called ``global_``)."""
        return tuple(field.alias or name for name, field in cls.model_fields.items())


class Run(_Block):
    """What the run is called, how long it is and where it goes."""

    name: Name = "quickstart"
    """Name of the run's directory inside ``dir``."""
    dir: Text = "runs"
    """Directory of all runs, relative to where the command was given."""
    steps: Count = 60
    """Optimizer steps of the whole run; learning-rate schedules span them."""
    stop_after: Count | None = None
    """End after this step with a checkpoint and status 0; schedules still span ``steps``."""
    stop_grace: Positive | None = None
    """Seconds that a signal to the launcher leaves the ranks to end their step and save, before they are killed;
    null: as long as they take."""
    restarts: Natural = 0
    """After a failure of a rank all ranks start again from the last whole checkpoint, so often at most."""
    seed: Natural = 1234
    """Seed of the initial weights, the sample order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: the accelerator where there is one, else the CPU."""
    eval_every: Natural = 20
    """Steps between evaluations on the validation samples; 0: never."""
    eval_samples: Literal["all"] | Count = 64
    """How many of the validation samples an evaluation looks at, spread over them and the same each time; all: every
    one."""
    sample_every: Natural = 0
    """Steps between texts that the model is asked for while it is trained, in the run's texts.jsonl; 0: never."""
    sample_prompt: Prompt = ""
    """The text that it continues; empty: it begins one."""
    sample_tokens: Size = 100
    """At most so many tokens behind the prompt."""
    log_every: Count = 1
    """Steps between lines of the console when it is not a terminal; metrics.jsonl always has every step."""


class RotaryScaling(_Block):
    """How rotary positions are slowed down for sequences longer than those that the model was trained on before."""

    kind: Literal["linear", "llama3", "yarn"]
    """``linear``: all of them (arXiv 2306.15595); ``llama3``: as Llama 3.1 has it; ``yarn``: arXiv 2309.00071."""
    factor: Annotated[Number, Field(ge=1)]
    """How many times longer sequences become."""
    original: Size | None = None
    """llama3, yarn: the sequence trained on before."""
    low: Positive = 1.0
    """llama3: what turns less often than that in ``original`` tokens is slowed down in full."""
    high: Positive = 4.0
    """llama3: what turns more often stays as it was."""
    beta_fast: Positive = 32.0
    """yarn: what turns more often than that in ``original`` tokens stays as it was."""
    beta_slow: Positive = 1.0
    """yarn: what turns less often is slowed down in full."""


class Model(_Block):
    """The transformer. With ``preset``, keys that are not given take the preset's value."""

    preset: Text | None = None
    """A published model: gpt2, llama-3-8b, ...; the keys below override it."""
    weights: Text | None = None
    """A directory of Hugging Face files (config.json and safetensors) that the run starts from, in place of random
    weights; a checkpoint goes before it. `shardweave import` writes the other keys from such a directory."""
    layers: Annotated[Whole, Field(ge=1, le=2_000)] = 4
    """Number of blocks."""
    hidden: Size = 128
    """Width of the hidden states."""
    heads: Size = 4
    """Number of query heads."""
    kv_heads: Size | None = None
    """Number of key and value heads (grouped-query attention); null: as many as ``heads``."""
    head_dim: Size | None = None
    """Width of one head; null: hidden / heads."""
    ffn: Size | None = None
    """Inner width of the MLP; null: the family's rule, 4 * hidden for gelu."""
    vocab: Auto | Size = "auto"
    """Number of tokens; auto: the tokenizer's."""
    sequence: Size = 128
    """Tokens in one sample."""
    position: Literal["learned", "rotary", "alibi"] = "alibi"
    """How positions enter: a learned table, rotated queries and keys, or biases on the attention scores."""
    rotary_base: Positive = 10000.0
    """rotary: the larger, the slower the slowest turns."""
    rotary_fraction: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """rotary: which part of a head's features turns (GPT-NeoX-20B: 0.25)."""
    rotary_scaling: RotaryScaling | None = None
    """rotary: ``{kind: yarn, factor: 4, original: 4096}`` or another kind, for longer sequences than trained on
    before; null: none."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, MLP and head."""
    norm_eps: Positive = 1.0e-5
    """Added to the variance (mean square) in every norm."""
    embedding_norm: Flag = True
    """A norm right after the embedding (BLOOM, arXiv 2211.05100, section 3.1.2): steadier early training."""
    qk_norm: Flag = False
    """A norm of each head's queries and keys (arXiv 2302.05442, section 2): attention scores stay bounded."""
    parallel_residual: Flag = False
    """Whether attention and MLP of a block read the same and are added at once (GPT-NeoX)."""
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu"] = "gelu"
    """Of the MLP; ``gelu_tanh`` is the approximation that GPT-2 and BLOOM were trained with."""
    bias: Flag | None = None
    """Whether linear layers have a bias; null: with layernorm yes, with rmsnorm no. Head and experts never have one."""
    attention_bias: Flag | None = None
    """Whether those of attention have one; null: as ``bias``."""
    mlp_bias: Flag | None = None
    """Whether those of the MLP have one; null: as ``bias``."""
    tie_embeddings: Flag = True
    """Whether the output head uses the embedding's weight."""
    dropout: Fraction = 0.0
    """Probability of dropping an element of the embedding, the attention's output and the MLP's output."""
    attention_dropout: Fraction = 0.0
    """Probability of dropping an attention weight."""
    experts: Natural = 0
    """More than 0: a mixture of that many experts in place of every MLP, without biases, of width `ffn` each."""
    experts_per_token: Count = 2
    """Experts that each token visits."""
    expert_capacity: Positive | None = None
    """Tokens of a sequence that an expert takes, as a multiple of the even share; null: all of them (dropless)."""
    balance_loss: NotNegative = 0.01
    """Weight of the loss that balances experts, per sequence: it does not depend on the micro-batch."""
    z_loss: NotNegative = 0.0
    """Weight of the loss that keeps the router's logits small."""
    head_z_loss: NotNegative = 0.0
    """Weight of the loss that keeps the output's logits from drifting away together (arXiv 2204.02311, section 5, has
    1e-4). `loss` is without it."""
    router_bias: NotNegative = 0.0
    """How far each step moves the biases by which experts that had fewer tokens than the mean are chosen more often:
    balance without a loss (arXiv 2408.15664), beside `balance_loss` or in place of it; 0: there are none. They are
    added to probabilities; 0.001 is usual."""


class WeightedSource(_Block):
    """One of several corpora."""

    source: Text
    """``builtin``, a path or a glob."""
    weight: NotNegative = 1.0
    """Share of the samples, relative to the other sources' weights; 0: none for now, and the source is not opened."""


class Data(_Block):
    """The text."""

    source: Text | Annotated[tuple[WeightedSource, ...], BeforeValidator(_tuple)] = "builtin"
    """``builtin`` (Python's own standard library), a file, a directory, a glob, or a list of ``{source, weight}``."""
    tokenizer: Text = "byte"
    """``byte``: 256 tokens, one per byte; or a ``tokenizer.json`` of Hugging Face's, or a directory with it or with
    GPT-2's vocab.json and merges.txt."""
    end_of_text: Text | Natural = "auto"
    """The token that closes each document, as text or as its number; auto: the one that the tokenizer's files name."""
    field: Text = "text"
    """Where the text is in a line of a ``.jsonl`` file or a row of a ``.parquet`` file."""
    validation: Fraction = 0.05
    """Share of the tokens that are never trained on: the last documents that together hold at most as much. A corpus of
    one document is cut inside it."""
    validation_source: Text | None = None
    """Another corpus to evaluate on, in place of a share of ``source``."""
    separate_documents: Flag = False
    """Whether documents of one sample are kept apart: their tokens do not see each other, and none is to predict the
    first one of the next document."""
    workers: Natural = 1
    """Threads of a rank that make the next steps' micro-batches while a step computes; 0: each is made when its step
    begins."""
    log_samples: Flag = False
    """Whether the ids of every step's samples are written to ``samples.jsonl`` in the run's directory."""


class Parallel(_Block):
    """How ranks divide the work."""

    data: Auto | Ranks = "auto"
    """Replicas with different data; auto: what the ranks at hand leave over."""
    tensor: Ranks = 1
    """Ranks that share every layer."""
    pipeline: Ranks = 1
    """Stages the layers are spread over."""
    context: Ranks = 1
    """Ranks that share every sequence; twice as many have to divide `model.sequence`."""
    context_form: Literal["ring", "all-to-all"] = "ring"
    """How context ranks attend to each other's tokens: keys and values go round, or heads are exchanged for tokens, for
    which `context` has to divide the query heads of a tensor rank."""
    expert: Ranks = 1
    """Ranks that share the experts of one layer: neighbours among the data ranks, whose number (with `zero.replicas`,
    in one copy) it has to divide. It asks for no further ranks."""
    sequence: Flag = True
    """Whether the tensor ranks also share what lies between their layers (sequence parallelism)."""
    keep_inputs: Flag = False
    """Whether layers that gather their input from the tensor ranks' parts of the sequence keep it whole, and do not
    gather it again for the backward pass: a fifth fewer bytes, for memory."""
    decomposed: Auto | Flag = False
    """Whether layers that gather or scatter a sequence compute their products in pieces while others travel (Wang et
    al., ASPLOS 2023); auto: where a prediction from measured links and products says that it pays, on an
    accelerator."""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved",
        "breadth-first",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "dualpipe-v",
    ] = "1f1b"
    """Order of the micro-batches' forward and backward passes over the stages."""
    chunks: Count = 1
    """Stages per pipeline rank; the V schedules take 2 whatever is said here."""


class Zero(_Block):
    """What data-parallel ranks share instead of holding copies (ZeRO, arXiv 1910.02054)."""

    stage: Annotated[Whole, Field(ge=0, le=3)] = 1
    """0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters."""
    offload: Literal["none", "cpu", "disk"] = "none"
    """Where the optimizer state lives."""
    prefetch: Auto | Natural = "auto"
    """Units of parameters gathered ahead of their use (stage 3); auto: 1."""
    max_live_parameters: Auto | Count = "auto"
    """Parameters of a rank gathered at once, at most (stage 3); auto: no bound."""
    keep_gathered: Auto | Natural = "auto"
    """Parameters of a rank that may stay gathered from their first use in a step to its end, instead of being gathered
    for every pass (stage 3); auto: 0."""
    shard_between_micro_batches: Auto | Flag = "auto"
    """Whether gradients are reduced after every micro-batch (less memory) or once a step (fewer bytes)."""
    gradient_dtype: DType = "auto"
    """Type in which gradients are accumulated."""
    reduce_dtype: DType = "auto"
    """Type in which gradients travel."""
    replicas: Count = 1
    """Copies of what is sharded: the data ranks are cut into so many equal groups, each shards over its own ranks,
    and between groups only sums of shards travel. With a copy on each node, no parameter is gathered over the
    network."""


class Batch(_Block):
    """Sequences: global = micro * accumulation * data; the accumulation follows from the other three."""

    global_: Annotated[Size, Field(alias="global")] = 16
    """Sequences per optimizer step, over all ranks."""
    micro: Size = 2
    """Sequences that one rank computes at once."""
    chunked_loss: Flag = False
    """Whether the output head and the loss are computed for some of their tokens at a time, and the logits once more in
    backward: all logits are never there. Worth it where the vocabulary is large."""


class Optimizer(_Block):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """One of torch.optim's."""
    lr: Positive = 1.0e-3
    """The highest learning rate."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_tuple)] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    eps: Positive = 1.0e-8
    """Added to Adam's denominator."""
    weight_decay: NotNegative = 0.1
    """Applied to matrices; not to biases and norms."""
    clip: Positive | None = 1.0
    """Bound on the global gradient norm; null: none."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls from ``lr`` to ``min_lr`` over the run."""
    warmup: Natural = 10
    """Steps over which the learning rate rises from 0 to ``lr``."""
    min_lr: NotNegative = 1.0e-4
    """The learning rate of the last step."""


class RecomputeEvery(_Block):
    """Recompute every n-th block."""

    every: Count
    """n."""


class RecomputeOperations(_Block):
    """Recompute the named operations of every block, and keep the results of the others that cost something."""

    operations: Annotated[
        tuple[Literal["attention", "linear", "norm", "activation", "elementwise"], ...],
        Field(min_length=1),
        BeforeValidator(_tuple),
    ]
    """Their names. Norms, activations and what is elementwise are recomputed in any case: naming one of these alone
    keeps the results of all products and of attention."""


def _recompute(value: object) -> object:
    """Chooses the block by its key, so that an error is about the key that is there."""
    if isinstance(value, Mapping):
        if set(value) == {"every"}:
            return RecomputeEvery.model_validate(value)
        if set(value) == {"operations"}:
            return RecomputeOperations.model_validate(value)
        raise PydanticCustomError("recompute", "{every: N} or {operations: [...]}")
    return value


class Comm(_Block):
    """Communication."""

    hierarchy: Literal["auto", "flat", "two-level"] = "auto"
    """Whether collectives go first inside a node and then between nodes: ``two-level``, ``flat``, or ``auto``, as the
    links say, which are measured at the start over several nodes. It takes equally many ranks, two or more, on each
    node."""
    shared_memory: Flag = True
    """Whether ranks of one host all-reduce, reduce-scatter, all-gather, send and receive tensors of the CPU through
    shared memory."""
    bucket_mb: Annotated[Positive, Field(le=1e6)] = 25
    """Size of the buckets in which gradients travel."""
    timeout: Annotated[Number, Field(ge=1, le=604_800)] = 300
    """Seconds after which a collective that does not end ends the job. After a fifth of it a report is printed."""
    debug: Flag = False
    """Whether ranks agree on every collective before it is sent, and say where they differ. For finding mistakes."""
    compression: Literal["none", "onebit", "twobit", "topk", "powersgd"] = "none"
    """Of gradients between data-parallel ranks, over several nodes between the nodes only. What is not sent is added to
    the next step's gradient. Updated parameters travel in full, from stage 1 on."""
    density: Annotated[Number, Field(gt=0, le=1)] = 0.01
    """topk: the share of entries that is sent."""
    rank: Count = 4
    """powersgd: the rank of the approximation."""
    warmup: Natural = 10
    """Plain steps before compression begins; Adam's second moment needs some."""


class Checkpoint(_Block):
    """Saving and resuming."""

    every: Natural = 20
    """Steps between checkpoints; 0: none."""
    keep: Natural = 2
    """How many of the newest are kept; 0: all."""
    async_: Annotated[Flag, Field(alias="async")] = True
    """Whether files are written while training goes on, from a copy in the host's memory."""
    resume: Text = "auto"
    """``auto``: continue from the run directory's newest whole checkpoint; ``never``; or a checkpoint's path."""


class Guard(_Block):
    """What happens when numbers go wrong."""

    nonfinite: Literal["skip", "stop", "rollback"] = "skip"
    """A loss or gradient that is not finite: skip the step on all ranks, stop the run, or go back to the last
    checkpoint and on without the samples of that step. Where it came from is told. With fp16, gradients are meant that
    are not finite at the smallest loss scale; above it, the scale is halved and the step skipped."""
    spike: Literal["off", "warn", "stop", "rollback"] = "warn"
    """A loss or gradient norm far above its level in the last 50 steps: no matter, a warning, the end of the run, or
    back to the last checkpoint and on without the samples of that step."""
    max_skips: Count = 10
    """More skipped steps in a row than this stop the run. Those that only find fp16's loss scale do not count."""
    max_rollbacks: Count = 10
    """More returns to a checkpoint than this, in the whole run, stop it."""


class Metrics(_Block):
    """What is shown while training."""

    tensorboard: Flag = False
    """Whether TensorBoard files are written, too."""
    console: Literal["auto", "bar", "lines", "none"] = "auto"
    """``auto``: a progress bar in a terminal, else one line per ``run.log_every`` steps."""
    statistics: Natural = 0
    """In every so many-th step metrics.jsonl has what each parameter's gradient and each part's output look like: root
    mean square, largest value, zeros. 0: never, and then nothing is spent on it."""


class Config(_Block):
    """A whole run. ``Config()`` is the default one; `load_config` reads a file and overrides.

    Raises:
        pydantic.ValidationError: from the constructor, for a value that the schema does not allow.
    """

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """Type of parameters and activations; with bf16 and fp16 the optimizer keeps fp32 masters. fp16 adds loss scaling:
    steps whose gradients overflow are skipped while the scale is found."""
    recompute: Annotated[
        Literal["none", "selective", "full"] | RecomputeEvery | RecomputeOperations,
        BeforeValidator(_recompute),
    ] = "none"
    """What backward computes again instead of keeping it: none; selective, the inside of attention's core; full, every
    block; {every: N}, every N-th block; {operations: [...]}, of every block all but the attention and the linear
    products that are not named. Gradients stay the same to the last bit."""
    compile: Flag = False
    """Whether ``torch.compile`` takes each block. What communicates, and the linear products, run as they are written,
    between the compiled pieces: what is won is in the rest. The first steps take minutes."""
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    metrics: Metrics = Metrics()

    @model_validator(mode="before")
    @classmethod
    def _empty_blocks(cls, value: object) -> object:
        """A block whose every line is commented out reads as null: it is the default block."""
        if not isinstance(value, Mapping):
            return value
        return {key: {} if item is None and key in cls.blocks() else item for key, item in value.items()}

    @classmethod
    def blocks(cls) -> dict[str, type[_Block]]:
        """The keys that hold a block of keys, with the block's class."""
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, _Block)
        }

    def plain(self) -> dict[str, Any]:
        """The same as dict, list, str, int, float, bool and None, with the keys of the YAML file, all of them."""
        return self.model_dump(mode="json", by_alias=True)
