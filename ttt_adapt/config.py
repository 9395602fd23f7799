"""Settings: one frozen model per owner. TOML in, resolved TOML out; unknown keys are errors.

Every field's default is the one the command line uses. ``noise_var`` is λ in the SIFT paper.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ttt_adapt.settings import (
    Settings,
    SettingsType,
    load_settings,
    make_settings,
    override,
    to_toml,
)

__all__ = [
    "AdaptationSettings",
    "ChunkSettings",
    "CorpusSettings",
    "EmbeddingSettings",
    "EvaluationSettings",
    "ExperimentSettings",
    "IndexSettings",
    "ModelSettings",
    "PretrainSettings",
    "RetrievalSettings",
    "ScoringSettings",
    "SelectionSettings",
    "Settings",
    "SettingsType",
    "SourceSettings",
    "load_settings",
    "make_settings",
    "override",
    "to_toml",
]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What numpy, torch and FAISS all accept."""


class CorpusSettings(Settings):
    """Where text comes from. Owner: ``ttt_adapt.corpus``."""

    later: ClassVar[tuple[str, ...]] = ("id_prefix",)

    path: str
    """A file, a directory, or ``hub:owner/name`` for a hub data set."""
    format: Literal["auto", "jsonl", "text", "tree", "parquet", "arrow", "hub"] = "auto"
    text_column: str = "text"
    id_column: str | None = None
    id_prefix: str = ""
    """Put before every document's id: tells corpora apart whose files have the same names."""
    subset_column: str | None = None
    """Column (dots descend, e.g. ``meta.pile_set_name``) that names a document's subset.
    ``None`` looks for ``meta.pile_set_name`` and then ``subset``."""
    split: str = "train"
    hub_config: str | None = None
    include: tuple[str, ...] = ()
    """gitignore-style patterns of files to read in a tree; empty: every text file."""
    exclude: tuple[str, ...] = ()
    separator: str | None = None
    """In plain text: a line that ends a document. ``None``: one file is one document."""
    on_error: Literal["fail", "skip"] = "fail"
    max_documents: PositiveInt | None = None
    max_document_bytes: PositiveInt = 64 * 2**20
    """A larger document is malformed input (``on_error`` decides)."""


class ChunkSettings(Settings):
    """How documents become passages. Owner: ``ttt_adapt.corpus``."""

    unit: Literal["bytes", "tokens"] = "bytes"
    size: PositiveInt = 1200
    overlap: Annotated[int, Field(ge=0)] = 0
    min_size: Annotated[int, Field(ge=0)] = 32
    """A last piece shorter than this joins nothing and is dropped, unless it is the only one."""

    @model_validator(mode="after")
    def _overlap_fits(self) -> Self:
        if self.overlap >= self.size:
            raise ValueError(f"overlap ({self.overlap}) must be smaller than size ({self.size})")
        return self


class EmbeddingSettings(Settings):
    """Text to unit vectors. Owner: ``ttt_adapt.embedding``."""

    kind: Literal["sentence-transformers", "causal-lm", "hashing"] = "sentence-transformers"
    model: str = "all-MiniLM-L6-v2"
    pooling: Literal["mean", "last"] = "mean"
    """Of a causal language model's hidden states; sentence-transformers bring their own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 where the processor computes in it, else float32."""
    max_tokens: PositiveInt | None = None
    """``None``: the model's own limit."""
    batch_size: PositiveInt = 32
    dimension: PositiveInt = 384
    """Of the hashing embedder only."""
    trust_remote_code: bool = False
    device: str = "auto"


class IndexSettings(Settings):
    """The FAISS index. Owner: ``ttt_adapt.indexes``."""

    factory: str = "auto"
    """A FAISS factory string (``Flat``, ``IVF256,Flat``, ``OPQ32,IVF1024,PQ32``, ``HNSW32``),
    or ``auto``: chosen from the number of passages and ``memory_budget_mb``."""
    memory_budget_mb: PositiveInt = 4096
    shard_passages: PositiveInt = 4096
    """Passages per shard: what a killed build loses at most."""
    train_vectors: PositiveInt = 200_000
    add_batch: PositiveInt = 16_384
    nprobe: PositiveInt | None = None
    """``None``: chosen with the factory."""
    ef_search: PositiveInt = 128
    seed: Seed = 0


class RetrievalSettings(Settings):
    """What the index may hand out for a query. Owner: ``ttt_adapt.indexes``."""

    num_candidates: PositiveInt = 200
    """K, per query row: the pool a selector chooses from."""
    exclude_own_document: bool = True
    max_overlap: Fraction = 0.5
    """Passages sharing a larger share of their word n-grams with the query are left out;
    1.0 leaves none out."""
    ngram_size: PositiveInt = 8
    query_rows: Literal["whole", "chunks"] = "whole"
    """``whole``: a query is one vector (its beginning, where it exceeds the embedder's limit).
    ``chunks``: one vector for each of its chunks, cut as the corpus was."""


class SelectionSettings(Settings):
    """What to learn from. Owner: ``ttt_adapt.selection``."""

    method: Literal[
        "nearest", "nearest-distinct", "sift", "sift-fast", "uncertainty", "mmr", "random"
    ] = "sift"
    num_select: PositiveInt = 50
    noise_var: Positive = 0.1
    """λ: small values spend picks on diversity, large ones on relevance. The paper has 0.01 for
    its encoder; with the default one, validation text has preferred 0.1 and more. Choose it on
    text you don't report on."""
    alpha: Positive | None = None
    """Adaptive stopping: keep picking while σ_n ≤ 1/(α n). ``None``: never stop early."""
    mmr_relevance: Fraction = 0.7
    """Weight of relevance against diversity in ``mmr``."""
    distinct_threshold: Fraction = 0.95
    """``nearest-distinct``: a candidate whose similarity with one already picked exceeds this
    counts as a duplicate."""
    dtype: Literal["float32", "float64"] = "float32"


class AdaptationSettings(Settings):
    """Learning per query. Owner: ``ttt_adapt.adaptation``."""

    method: Literal["none", "in-context", "full", "lora", "fast-weights"] = "full"
    optimizer: Literal["adam", "adamw"] = "adam"
    learning_rate: Positive | None = None
    """``None``: by the model's size, see :func:`ttt_adapt.adaptation.default_learning_rate`."""
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    epsilon: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Positive | None = None
    epochs: PositiveInt = 1
    order: Literal["nearest-first", "farthest-first", "as-selected", "random"] | None = None
    """``None``: as selected, which for nearest neighbours is nearest first; ``fast-weights``
    reads farthest first, so that the nearest is freshest."""
    max_length: PositiveInt | None = None
    """Tokens per training chunk; longer passages become several chunks, one step each.
    ``None``: the model's own limit."""
    half_life: Annotated[int, Field(ge=0)] = 2048
    """Tokens after which ``fast-weights`` keep half of what they learned; 0: nothing is forgotten."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast for learning and reading. Scoring has its own (``ScoringSettings.precision``)."""
    protocol: Literal["standard", "tttlm"] = "standard"
    """``tttlm`` keeps one AdamW for all queries of a run, moments and all, as the public
    TTT-NN code does."""
    explosion_factor: Positive = 4.0
    """A step whose loss exceeds this many times the first step's ends that query's learning."""
    lora_rank: PositiveInt = 8
    lora_alpha: Positive = 16.0
    lora_targets: tuple[str, ...] = ()
    """Names of linear layers; empty: every linear layer but the output head."""


class ScoringSettings(Settings):
    """Bits per byte. Owner: ``ttt_adapt.evaluation``."""

    max_length: PositiveInt | None = None
    """Tokens per window; ``None``: the model's own limit."""
    stride: PositiveInt | None = None
    """New tokens per window; ``None``: ``max_length``, i.e. disjoint windows."""
    batch_size: PositiveInt = 8
    precision: Literal["float32", "bfloat16"] = "float32"


class EvaluationSettings(Settings):
    """One run over a set of texts. Owner: ``ttt_adapt.evaluation``."""

    protocol: Literal["full", "split"] = "full"
    """``full``: retrieve with the text being scored. ``split``: retrieve with its first half,
    score the second."""
    steps: tuple[Annotated[int, Field(ge=0)], ...] = (0, 1, 5, 10, 20, 50)
    max_bytes: PositiveInt | None = None
    """Score at most this many bytes of each text (cut at a character)."""
    per_subset: PositiveInt | None = None
    """Texts per subset, the first ones of a seeded shuffle; ``None``: all."""
    num_resamples: PositiveInt = 2000
    seed: Seed = 0

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        if list(self.steps) != sorted(set(self.steps)) or not self.steps:
            raise ValueError(f"steps must ascend without repeats, found {self.steps}")
        return self


class ModelSettings(Settings):
    """The language model. Owner: ``ttt_adapt.models``."""

    name: str = "llama-7m"
    """A bundled model's name, a local directory, or a hub id."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    trust_remote_code: bool = False


class ExperimentSettings(Settings):
    """Everything ``ttt-adapt eval`` needs: what its TOML recipe holds."""

    model: ModelSettings = ModelSettings()
    data: CorpusSettings | None = None
    retrieval: RetrievalSettings = RetrievalSettings()
    selection: SelectionSettings = SelectionSettings()
    adaptation: AdaptationSettings = AdaptationSettings()
    scoring: ScoringSettings = ScoringSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    corpus: CorpusSettings | None = None
    chunks: ChunkSettings = ChunkSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    index: IndexSettings = IndexSettings()
    seed: Seed = 0


class SourceSettings(CorpusSettings):
    """A share of a pretraining mixture."""

    later: ClassVar[tuple[str, ...]] = (*CorpusSettings.later, "related")

    fraction: Fraction = 1.0
    """Of its documents, chosen by a hash of their text."""
    related: bool = False
    """Cut into passages, each after one it resembles, so that windows hold what belongs together."""


class PretrainSettings(Settings):
    """A language model trained from scratch, or further. Owner: ``ttt_adapt.training``."""

    later: ClassVar[tuple[str, ...]] = (
        "architecture", "backbone", "mini_batch_size", "base_lr", "base_lr_start",
        "base_lr_warmup_fraction", "schedule", "final_learning_rate", "inner_norm", "learnable_w0",
        "learnable_lr", "feature_map", "tokenizer", "initial_parts",
    )  # fmt: skip

    name: str
    data_description: str = ""
    """What the sources are and under which terms, for the model card."""
    sources: tuple[SourceSettings, ...]
    validation: tuple[SourceSettings, ...] = ()
    architecture: Literal["llama", "ttt-linear", "ttt-mlp", "transformer", "linear-attention"] = (
        "llama"
    )
    """``llama``: as transformers has it. The others are of :mod:`ttt_adapt.models.ttt`, one code
    and one initialisation; ``transformer`` is their baseline."""
    backbone: Literal["transformer", "mamba"] = "transformer"
    """Of the TTT architectures; ``mamba``: q and k of one projection, convolutions, an output
    gate."""
    mini_batch_size: PositiveInt = 16
    """Tokens per inner step of the TTT architectures."""
    base_lr: Positive | None = None
    """Inner learning rate before its gate; ``None``: 1 for ttt-linear, 0.1 for ttt-mlp."""
    base_lr_start: Positive | None = None
    """The inner learning rate rises to ``base_lr`` from this; ``None``: it is constant."""
    base_lr_warmup_fraction: Fraction = 0.1
    """The share of steps over which it rises."""
    inner_norm: bool = True
    """``false``: the inner model of ttt-linear has no layer norm and no residual."""
    learnable_w0: bool = True
    """``false``: without ``inner_norm``, sequences begin with W = 0."""
    learnable_lr: bool = True
    """``false``: inner learning rates of the TTT architectures stay what they begin with."""
    feature_map: Literal["identity", "elu"] = "identity"
    """Of linear-attention; ``elu``: with a normaliser, as it was first published."""
    tokenizer: str | None = None
    """Take this model's tokenizer (a bundled name or a directory) instead of learning one."""
    vocab_size: PositiveInt = 8192
    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 704
    num_layers: PositiveInt = 6
    num_heads: PositiveInt = 4
    max_length: PositiveInt = 1024
    initial_model: str | None = None
    """Begin with this model's weights and tokenizer (a bundled name or a directory, of the shape
    given here) and a new warm-up, instead of random weights."""
    initial_parts: Literal["all", "all-but-mixers"] = "all"
    """``all-but-mixers``: of ``initial_model``, a Llama or one of ours, take embeddings, norms and
    feed-forward layers; what mixes tokens begins anew, of whatever architecture: at random, the
    Mamba backbone's convolutions before it at zero."""
    skip_tokens: NonNegativeInt = 0
    """Tokens of the packed mixture to pass over: those that ``initial_model`` has read."""
    early_length: PositiveInt | None = None
    """Before the rate falls, sequences are cut to this: cheaper, and long contexts are learned
    late anyway. Must divide ``max_length``. ``None``: full length throughout."""
    num_tokens: PositiveInt = 30_000_000
    batch_size: PositiveInt = 16
    """Sequences of ``max_length`` tokens per outer step."""
    micro_batch_size: PositiveInt = 2
    optimizer: Literal["muon", "adamw"] = "muon"
    """``muon``: Muon for the hidden matrices, AdamW for the rest."""
    learning_rate: Positive = 3e-3
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    max_grad_norm: Positive = 1.0
    warmup_fraction: Fraction = 0.02
    decay_fraction: Fraction = 0.3
    """The share of steps over which the rate falls linearly, after a constant stretch."""
    schedule: Literal["constant", "cosine"] = "constant"
    """``cosine``: from the warm-up on, the rate falls along half a cosine; such a run cannot be
    extended, for its length decides every step."""
    final_learning_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """What the rate falls to."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    validate_every: PositiveInt = 100
    checkpoint_every: PositiveInt = 100
    validation_batches: PositiveInt = 8
    seed: Seed = 0

    @model_validator(mode="after")
    def _lengths_divide(self) -> Self:
        if self.early_length and self.max_length % self.early_length:
            raise ValueError(
                f"early_length ({self.early_length}) must divide max_length ({self.max_length})"
            )
        return self

    @model_validator(mode="after")
    def _backbone_is_of_ttt(self) -> Self:
        if self.backbone == "mamba" and not self.architecture.startswith("ttt-"):
            raise ValueError(
                f"backbone mamba is of ttt-linear and ttt-mlp; found architecture "
                f"{self.architecture}"
            )
        return self

    @model_validator(mode="after")
    def _options_are_of_the_architecture(self) -> Self:
        found = self.architecture
        if found != "ttt-linear" and not (self.inner_norm and self.learnable_w0):
            raise ValueError(f"inner_norm and learnable_w0 are of ttt-linear; found {found}")
        if self.inner_norm and not self.learnable_w0:
            raise ValueError("learnable_w0 = false needs inner_norm = false")
        if not found.startswith("ttt-") and not self.learnable_lr:
            raise ValueError(f"learnable_lr is of ttt-linear and ttt-mlp; found {found}")
        if found != "linear-attention" and self.feature_map != "identity":
            raise ValueError(f"feature_map is of linear-attention; found {found}")
        return self

    @model_validator(mode="after")
    def _initial_model_is_whole(self) -> Self:
        if self.tokenizer and self.initial_model:
            raise ValueError("initial_model brings its own tokenizer; leave tokenizer out")
        if self.initial_parts != "all" and not self.initial_model:
            raise ValueError("initial_parts needs an initial_model")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        # Rotary positions turn pairs of a head's dimensions.
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"num_heads ({self.num_heads}) must cut hidden_size ({self.hidden_size}) into "
                "heads of even width"
            )
        return self
