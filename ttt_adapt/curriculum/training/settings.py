"""Settings of reinforcement learning on a curriculum."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ttt_adapt.curriculum.sampling_settings import Positive, PositiveInt, PromptSettings, Seed

NonNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class GRPOSettings(PromptSettings):
    """GRPO on verifiable tasks. Owner: ``ttt_adapt.curriculum.training``.

    A *step* draws ``num_generations`` completions of each of ``prompts_per_step`` tasks, verifies
    them, and learns from them in updates of ``prompts_per_update`` tasks' worth of completions.

    Source of the recipe: TTC-RL's official training scripts (``jonhue/ttc``).
    """

    num_steps: PositiveInt | None = None
    """``None``: as many as ``epochs`` need."""
    epochs: PositiveInt = 2
    """Times that each task is practised, where ``num_steps`` is not given."""
    prompts_per_step: PositiveInt = 8
    num_generations: Annotated[int, Field(ge=2)] = 16
    """Completions of each task in a step: the group that rewards are compared in."""
    prompts_per_update: PositiveInt | None = None
    """Completions in one optimizer update, in tasks' worth (they are drawn from all of the step's
    tasks); divides ``prompts_per_step``. ``None``: one update a step."""
    num_iterations: PositiveInt = 1
    """Times that a step's completions are learned from."""
    micro_batch_size: PositiveInt | None = None
    """Completions in one forward and backward pass of a process; divides an update's. ``None``:
    all of them."""
    order: Literal["shuffled", "given"] = "shuffled"
    """Of the tasks within an epoch."""

    learning_rate: Positive = 1e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises to its value, to stay there."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.28
    """The ratio of new to old probability counts up to 1 + this where a completion was good."""
    kl_weight: NonNegative = 0.0
    """β: weight of the divergence from the model as it was; 0 needs no second model."""
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    """How losses of tokens are averaged; see TRL's ``loss_type``. ``dapo``: over all tokens."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Advantages are divided by the standard deviation of rewards in the group, in the step, or
    not at all."""
    zero_signal: Literal["skip", "keep"] = "skip"
    """Groups whose rewards are all equal teach nothing. ``skip``: they cost no pass and don't count
    in averages, and an update without any signal leaves the weights alone. ``keep``: they count
    as tokens with a loss of zero."""
    learn_from_truncated: bool = True
    """Whether completions cut off at ``max_completion_tokens`` are learned from."""

    temperature: Positive = 1.0
    max_completion_tokens: PositiveInt = 512
    generation: Literal["batched", "transformers", "vllm"] = "batched"
    """``batched``: prompts are read once for all their completions, which are reproducible one by
    one; ``transformers``: ``model.generate``; ``vllm``: needs the package of that name and a GPU."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    vllm_server_url: str | None = None
    vllm_memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Of the GPU, for vLLM in the training process (``colocate``)."""

    method: Literal["full", "lora"] = "full"
    lora_rank: PositiveInt = 32
    lora_alpha: Positive = 64.0
    lora_targets: tuple[str, ...] = ()
    """Names of linear layers; empty: every linear layer but the output head."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in memory. A full model learns in float32 only: at usual learning rates its
    updates are smaller than bfloat16 resolves."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast. ``auto``: bfloat16 on GPUs that have it, float32 elsewhere."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Less memory for a fifth more time. ``auto``: for models of 300M parameters and more."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the model that is written in the end; ``None``: as in memory."""

    reselect_every: PositiveInt | None = None
    """Steps after which tasks are chosen anew; ``None``: never."""
    band: tuple[Share, Share] = (0.25, 0.6)
    """Pass rates that a task practised before may have to be chosen again."""
    num_verifiers: PositiveInt = 1
    """Completions verified at once."""
    save_every: PositiveInt = 10
    """Steps between checkpoints."""
    seed: Seed = 0

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step."""
        per_update = self.prompts_per_update or self.prompts_per_step
        return self.prompts_per_step // per_update * self.num_iterations

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        per_update = self.prompts_per_update or self.prompts_per_step
        if self.prompts_per_step % per_update:
            raise ValueError(
                f"prompts_per_update ({per_update}) must divide prompts_per_step "
                f"({self.prompts_per_step})"
            )
        rollouts = per_update * self.num_generations
        if self.micro_batch_size is not None and rollouts % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must divide the {rollouts} completions "
                "of an update"
            )
        if self.method == "full" and self.dtype != "float32":
            raise ValueError(
                "method 'full' learns in dtype 'float32' only; set precision to 'bfloat16' for "
                "speed, or method to 'lora'"
            )
        if self.vllm_mode == "server" and self.generation == "vllm" and not self.vllm_server_url:
            raise ValueError("vllm_mode 'server' needs vllm_server_url")
        if self.band[0] > self.band[1]:
            raise ValueError(f"band must be low and high, found {self.band}")
        return self
