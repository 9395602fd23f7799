"""Settings of choosing a curriculum."""

from typing import Annotated, Literal

from pydantic import Field

from ttt_adapt.settings import Settings

PositiveInt = Annotated[int, Field(ge=1)]


class CurriculumSelectionSettings(Settings):
    """Which tasks of a corpus are practised. Owner: ``ttt_adapt.curriculum.selecting``."""

    method: Literal["sift", "nearest", "round-robin", "random"] = "sift"
    """``nearest``: by the mean similarity with all targets; ``round-robin``: each target in turn
    takes its nearest task that is left."""
    num_select: PositiveInt = 1000
    """N. Each task is chosen once at most: a smaller corpus is chosen whole."""
    noise_var: Annotated[float, Field(gt=0.0)] | None = None
    """λ of SIFT: small values spend picks on diversity, large ones on relevance. ``None``: as
    :func:`~ttt_adapt.curriculum.selecting.noise.suggested_noise_var` derives it from the embeddings
    and ``num_select``."""
    min_similarity: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.0
    """SIFT considers tasks whose cosine with at least one target is larger; if these are fewer than
    N, the N most similar. Without this it takes opposite vectors for as telling as equal ones, and
    among centred vectors those are other families. -1.0: considers all."""
    embedder: Literal["policy-mean", "policy-last", "sentence", "hashing"] = "policy-mean"
    """``policy-…``: the last hidden states of the model that will practise, averaged over a prompt's
    tokens (and centred: what all tasks share is subtracted), or of its last token. ``sentence``: a
    sentence encoder. ``hashing``: no weights at all."""
    model: str | None = None
    """Of the embedder: a bundled model's name, a folder or a hub id; ``None``: the bundled language
    model, or the default sentence encoder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    trust_remote_code: bool = False
    batch_size: PositiveInt = 32
    max_tokens: PositiveInt | None = None
    """Of a task; ``None``: what the model's positions allow. A longer prompt keeps its end for a
    policy (examples come first, the problem last), its beginning for other embedders."""
    chat_template: Literal["auto", "never"] = "auto"
    """``auto``: a policy reads a prompt as its tokenizer's chat template writes it, where it has
    one."""
    text: Literal["auto", "prompt", "problem"] = "auto"
    """What of a task is embedded: all that the model reads, or the problem without the instructions
    and examples around it. ``auto``: the prompt for a policy, else the problem."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of ``random``, and of the sample that the report's statistics of the corpus are taken from."""
