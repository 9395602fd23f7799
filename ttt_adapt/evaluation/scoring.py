"""Bits per byte of texts under a causal language model.

    bits per byte = −Σ ln p(token | what was read before it) / (ln 2 · Σ UTF-8 bytes)

over every token of every text, the first included: see :mod:`ttt_adapt.evaluation.windows` for
what is read before which token. It is a ratio of sums, so a long text weighs more than a short
one, and it does not depend on how a tokenizer cuts: models with different ones can be compared.

Texts are tokenised without the special tokens some tokenizers add by themselves: the windows bring
the beginning token. (lm-evaluation-harness leaves them in unless told ``add_bos_token=False``, and
then counts the added token as text.) Prefix, context and text are tokenised apart, so that the
scored tokens are the same with and without them.

Dimension legend: B windows of a batch, T tokens of the longest, V vocabulary.
"""

import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ttt_adapt.errors import ModelError, SettingsError, UserError
from ttt_adapt.evaluation.scores import add_scores
from ttt_adapt.evaluation.windows import Window, check_lengths, make_windows
from ttt_adapt.models import beginning_token
from ttt_adapt.types import BitsPerByte, Score

MAX_BATCH_LOGITS = 2**27
"""Logits of one forward pass (B·T·V); larger batches are split. 512 MiB in float32."""
MAX_BATCH_TOKENS_CPU = 512
"""Tokens of one forward pass (B·T) on CPU, unless a single window is longer. A core is busy with
that many; more only overflow its cache, and wait for padding."""
_ROW_BLOCK_LOGITS = 2**18
"""Logits turned into log-probabilities at once on CPU: small enough for the L2 cache."""


class LossyTokenizerWarning(UserWarning):
    """A tokenizer does not give back the texts it was given, so bits per byte come out too low."""


def bits_per_byte(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    prefix: Sequence[int] = (),
    contexts: Sequence[str] | None = None,
    precision: str = "float32",
) -> BitsPerByte:
    """Score texts: nats, UTF-8 bytes and tokens of each, and their sums.

    A text's result does not depend, beyond rounding, on the texts beside it or on ``batch_size``.
    An empty text scores 0 nats over 0 bytes. The model is put in eval mode meanwhile, and its
    mode is restored; gradients are neither needed nor touched.

    Args:
        model: a causal language model of transformers, or one that answers the same call.
        tokenizer: its tokenizer.
        texts: what to score.
        max_length: tokens per window; ``None``: the model's own limit.
        stride: new tokens per later window; ``None``: ``max_length`` (disjoint windows).
        batch_size: windows per forward pass at most; fewer where they would exceed
            ``MAX_BATCH_LOGITS`` or, on CPU, ``MAX_BATCH_TOKENS_CPU``.
        prefix: token ids read, not scored, before each window of each text (in-context data).
        contexts: for each text the text right before it: read, not scored, not counted in bytes.
        precision: of the forward pass: ``float32`` computes in the weights' own type,
            ``bfloat16`` under autocast. Log-probabilities are float32 and their sum float64
            either way.

    Raises:
        UserError: ``texts`` is one string, holds a lone surrogate, or differs from ``contexts``
            in number.
        SettingsError: lengths, batch size or precision out of range.
        ModelError: no beginning token, a token id beyond the vocabulary, or a text that the
            tokenizer turns into nothing.
    """
    limit = model_max_length(model, tokenizer)
    if max_length is None:
        if limit is None:
            raise ModelError(
                "the model's configuration states no length limit; pass max_length (in tokens)"
            )
        max_length = limit
    elif limit is not None and max_length > limit:
        raise SettingsError(f"max_length {max_length} exceeds the model's limit of {limit} tokens")
    stride = check_lengths(max_length, stride)
    if batch_size < 1:
        raise SettingsError(f"batch_size must be at least 1, found {batch_size}")

    num_bytes = _count_bytes(texts, "text")
    tokens = _tokenize(tokenizer, texts)
    before: list[list[int]] = [[] for _ in texts]
    if contexts is not None:
        if len(contexts) != len(texts):
            raise UserError(
                f"expected one context a text: {len(texts)} texts, {len(contexts)} contexts"
            )
        _count_bytes(contexts, "context")
        before = _tokenize(tokenizer, contexts)
    for position, (count, ids) in enumerate(zip(num_bytes, tokens, strict=True)):
        if count and not ids:
            raise ModelError(
                f"text {position}: the tokenizer made no tokens of {count} bytes, "
                "so they cannot be scored"
            )

    beginning = beginning_token(tokenizer)
    prefix = tuple(int(token) for token in prefix)
    windows: list[Window] = []
    owners: list[int] = []
    for position, ids in enumerate(tokens):
        made = make_windows(
            ids,
            beginning=beginning,
            max_length=max_length,
            stride=stride,
            prefix=prefix,
            context=before[position],
        )
        windows += made
        owners += [position] * len(made)
    _check_vocabulary(model, [(beginning,), prefix, *before, *tokens])

    nats: list[list[float]] = [[] for _ in texts]
    for window, value in enumerate(_window_nats(model, windows, batch_size, precision)):
        nats[owners[window]].append(value)
    scores = tuple(
        Score(math.fsum(parts), count, len(ids))
        for parts, count, ids in zip(nats, num_bytes, tokens, strict=True)
    )
    return BitsPerByte(add_scores(scores), scores)


def model_max_length(model: Any, tokenizer: Any) -> int | None:
    """Tokens a model reads at once, from its configuration, else its tokenizer; ``None``: unknown."""
    config = getattr(model, "config", None)
    for owner in (getattr(config, "text_config", None), config):
        for name in ("n_positions", "max_position_embeddings", "n_ctx"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    value = getattr(tokenizer, "model_max_length", None)
    # transformers writes int(1e30) where nothing is known.
    return value if isinstance(value, int) and 0 < value < 10**9 else None


def warn_if_lossy(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Positions of the texts that the tokenizer does not give back when it decodes its own tokens.

    Bytes are counted of the text as it is. A tokenizer that lowercases, strips or maps unknown
    characters to one token has less to predict than those bytes hold, so its bits per byte are
    lower than they ought to be. If any text is affected, one :class:`LossyTokenizerWarning` says
    how many. :func:`bits_per_byte` does not call this: once a data set is enough.
    """
    lossy = [
        position
        for position, (text, ids) in enumerate(zip(texts, _tokenize(tokenizer, texts), strict=True))
        if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        != text
    ]
    if lossy:
        warnings.warn(
            f"the tokenizer does not give back {len(lossy)} of {len(texts)} texts (the first is "
            f"number {lossy[0]}): bits per byte of them are too low to compare with other "
            "tokenizers",
            LossyTokenizerWarning,
            stacklevel=2,
        )
    return lossy


def _count_bytes(texts: Sequence[str], what: str) -> list[int]:
    if isinstance(texts, (str, bytes)):
        raise UserError(f"expected a sequence of {what}s, found one string; wrap it in a list")
    counts = []
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{what} {position}: expected str, found {type(text).__name__}")
        try:
            counts.append(len(text.encode("utf-8")))
        except UnicodeEncodeError as error:
            raise UserError(
                f"{what} {position}: a lone surrogate (U+{ord(text[error.start]):04X}) at "
                f"character {error.start} has no UTF-8 form; replace or remove it"
            ) from None
    return counts


def _tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return [list(ids) for ids in encoded["input_ids"]]


def _check_vocabulary(model: Any, sequences: Sequence[Sequence[int]]) -> None:
    used = [(min(ids), max(ids)) for ids in sequences if ids]
    lowest, highest = min(low for low, _ in used), max(high for _, high in used)
    size = _vocabulary_size(model)
    if lowest < 0 or (size is not None and highest >= size):
        raise ModelError(
            f"token ids {lowest} to {highest} do not fit the model's vocabulary of {size}: "
            "the tokenizer belongs to another model"
        )


def _vocabulary_size(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return getattr(getattr(model, "config", None), "vocab_size", None)


@contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    """Eval mode inside; afterwards exactly those modules train that did before."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    if precision not in ("float32", "bfloat16"):
        raise SettingsError(f"precision must be float32 or bfloat16, found {precision!r}")
    # Disabled explicitly for float32, so that a caller's autocast does not reach in.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def _window_nats(
    model: Any, windows: Sequence[Window], batch_size: int, precision: str
) -> list[float]:
    """−Σ ln p of each window's scored tokens, in input order."""
    device = next(model.parameters()).device
    nats = [0.0] * len(windows)
    # Longest first: neighbours pad least, and memory runs out at once or not at all.
    order = sorted(range(len(windows)), key=lambda position: -windows[position].num_read)
    lengths = [windows[position].num_read for position in order]
    max_tokens = MAX_BATCH_LOGITS // (_vocabulary_size(model) or 1)
    if device.type == "cpu":
        max_tokens = min(max_tokens, MAX_BATCH_TOKENS_CPU)
    keeps_logits = _accepts_logits_to_keep(model)
    # no_grad, not inference_mode: a model may cache tensors (rotary tables), and inference
    # tensors would break the next training step.
    with _autocast(device, precision), torch.no_grad(), _eval_mode(model):
        for first, last in pairwise(batch_cuts(lengths, batch_size, max_tokens)):
            batch = order[first:last]
            values = _batch_nats(model, [windows[i] for i in batch], device, keeps_logits)
            for position, value in zip(batch, values, strict=True):
                nats[position] = value
    return nats


def batch_cuts(lengths: Sequence[int], batch_size: int, max_tokens: int) -> list[int]:
    """Boundaries of batches over windows sorted longest first: 0, …, ``len(lengths)``.

    A batch has at most ``batch_size`` windows and, padded to its longest, ``max_tokens`` tokens;
    a longer window is a batch of its own.
    """
    cuts = [0]
    while cuts[-1] < len(lengths):
        fitting = max(1, max_tokens // lengths[cuts[-1]])
        cuts.append(min(len(lengths), cuts[-1] + min(batch_size, fitting)))
    return cuts


def _batch_nats(
    model: Any, windows: Sequence[Window], device: torch.device, keeps_logits: bool
) -> list[float]:
    """One forward pass over windows sorted longest first, right-padded."""
    longest = windows[0].num_read
    inputs_BT = torch.zeros(len(windows), longest, dtype=torch.int64)
    for row, window in enumerate(windows):
        inputs_BT[row, : window.num_read] = torch.tensor(window.read())
    arguments: dict[str, Any] = {}
    if windows[-1].num_read < longest:
        lengths_B = torch.tensor([window.num_read for window in windows])
        mask_BT = torch.arange(longest)[None, :] < lengths_B[:, None]
        arguments["attention_mask"] = mask_BT.to(device, torch.int64)
    # The head is a good part of a small model's work: ask for no row that nobody scores.
    skipped = min(window.num_read - window.num_scored for window in windows) if keeps_logits else 0
    if skipped:
        arguments["logits_to_keep"] = longest - skipped
    logits_BTV = model(input_ids=inputs_BT.to(device), use_cache=False, **arguments).logits
    expected = (len(windows), longest - skipped)
    if tuple(logits_BTV.shape[:2]) != expected:
        raise ModelError(
            f"expected logits for {expected[0]} windows of {expected[1]} tokens, found a tensor "
            f"of shape {tuple(logits_BTV.shape)}"
        )
    block_logits = _ROW_BLOCK_LOGITS if device.type == "cpu" else MAX_BATCH_LOGITS
    block = max(1, block_logits // logits_BTV.shape[-1])
    sums_B = torch.zeros(len(windows), dtype=torch.float64, device=device)
    for row, window in enumerate(windows):
        stop = window.num_read - skipped
        targets = window.targets()
        if max(targets) >= logits_BTV.shape[-1]:
            raise ModelError(
                f"token id {max(targets)} is beyond the model's {logits_BTV.shape[-1]} outputs: "
                "the tokenizer belongs to another model"
            )
        rows = logits_BTV[row, stop - window.num_scored : stop]
        sums_B[row] = negative_log_likelihood(rows, torch.tensor(targets, device=device), block)
    return [float(value) for value in sums_B.tolist()]


def negative_log_likelihood(logits_TV: Tensor, targets_T: Tensor, block: int) -> Tensor:
    """Σ (logsumexp − target logit), a float64 scalar, ``block`` rows at a time.

    No ``[T, V]`` of log-probabilities is ever made; each is float32, their sum float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
    for first in range(0, len(targets_T), block):
        rows_TV = logits_TV[first : first + block].float()
        chosen = rows_TV.gather(-1, targets_T[first : first + block, None])[:, 0]
        total += (rows_TV.logsumexp(-1) - chosen).double().sum()
    return total


def _accepts_logits_to_keep(model: Any) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(base.forward).parameters
