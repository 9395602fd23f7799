"""Token windows: which tokens a model reads, and which of them count, so that each counts once.

A model that reads ``max_length`` tokens at once scores a longer text window by window:

- The **first window** reads the beginning token, then ``prefix`` (retrieved passages), then
  ``context`` (the text right before the scored one), then the text. It scores every text token in
  it, the first included.
- **Later windows** read ``max_length`` tokens and score the last ``stride`` of their outputs: they
  read ``max_length − stride`` tokens again, and the one that the previous window scored but never
  read. With ``stride == max_length`` that one token is all the context: disjoint windows. A last
  window with fewer new tokens than ``stride`` reads the more of what came before. These are
  exactly the windows of lm-evaluation-harness' ``loglikelihood_rolling``
  (``get_rolling_token_windows``, then ``make_disjoint_window``).
- A **prefix** is read again, after the beginning token, at the start of every window. It is never
  scored.
- A **context** is not repeated: later windows reach back into it only where their
  ``max_length`` tokens do. It is never scored.

How much of prefix and context is kept, for a text of n tokens and windows of L: together at most
``max(L // 2, L − n)`` tokens. A short text leaves them all the room it does not need itself; a
long one always keeps half of each window. Of each the rightmost tokens stay, those nearest to the
text. Where they compete each is sure of half of the room, and takes what the other leaves.
Where even a kept half would leave no room to move on (``L == 2``) nothing is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttt_adapt.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Window:
    """One forward pass: read ``head + tokens[start:stop-1]``, score ``tokens[stop-num_scored:stop]``.

    Attributes:
        head: token ids read first: beginning token and prefix; empty in later windows that have
            no prefix.
        tokens: the context's and the text's token ids, shared by all windows of a text.
        start: first position of ``tokens`` that is read.
        stop: one past the last position that is scored.
        num_scored: positions scored, the last ones before ``stop``.
    """

    head: tuple[int, ...]
    tokens: Sequence[int]
    start: int
    stop: int
    num_scored: int

    @property
    def num_read(self) -> int:
        """Tokens that the model reads in this window; at most ``max_length``."""
        return len(self.head) + self.stop - 1 - self.start

    def read(self) -> list[int]:
        """Token ids that the model reads, ``[num_read]``."""
        return [*self.head, *self.tokens[self.start : self.stop - 1]]

    def targets(self) -> list[int]:
        """Token ids that are scored, ``[num_scored]``: the outputs at the last inputs."""
        return list(self.tokens[self.stop - self.num_scored : self.stop])


def make_windows(
    text: Sequence[int],
    *,
    beginning: int,
    max_length: int,
    stride: int | None = None,
    prefix: Sequence[int] = (),
    context: Sequence[int] = (),
) -> list[Window]:
    """Windows that score each token of ``text`` exactly once, in order; none for an empty text.

    Args:
        text: token ids to score.
        beginning: token id read before everything else (bos or eos).
        max_length: tokens a window reads at most.
        stride: new tokens per later window; ``None``: ``max_length``, i.e. disjoint windows.
            Where a prefix leaves less room than that, as many as fit beside it and one token of
            context.
        prefix: token ids read at the start of every window.
        context: token ids that come right before the text.

    Raises:
        SettingsError: ``max_length`` below 1, or ``stride`` outside 1 … ``max_length``.

    Source: the rolling windows of lm-evaluation-harness (``lm_eval.utils``), with prefix added.
    """
    stride = check_lengths(max_length, stride)
    num_text = len(text)
    if not num_text:
        return []
    kept_prefix, kept_context = _kept(len(prefix), len(context), num_text, max_length)
    reserved = kept_prefix + kept_context
    opening = (beginning, *prefix[len(prefix) - kept_prefix :])
    head = opening if kept_prefix else ()

    offset = len(context)
    tokens = [*context, *text] if offset else text
    scored = min(max_length - reserved, num_text)
    windows = [Window(opening, tokens, offset - kept_context, offset + scored, scored)]
    # What is read beside the head, plus the last token, which is scored but not read.
    room = max_length + 1 - len(head)
    step = min(stride, room - 1)
    while scored < num_text:
        num_new = min(step, num_text - scored)
        scored += num_new
        stop = offset + scored
        windows.append(Window(head, tokens, max(0, stop - room), stop, num_new))
    return windows


def check_lengths(max_length: int, stride: int | None) -> int:
    """The stride to use; :class:`SettingsError` where the two do not make windows."""
    if max_length < 1:
        raise SettingsError(f"max_length must be at least 1 token, found {max_length}")
    if stride is None:
        return max_length
    if not 1 <= stride <= max_length:
        raise SettingsError(
            f"stride must be between 1 and max_length ({max_length}), found {stride}: a larger "
            "one would leave tokens unscored"
        )
    return stride


def _kept(num_prefix: int, num_context: int, num_text: int, max_length: int) -> tuple[int, int]:
    """Tokens of prefix and context that are read; see the module's rule."""
    room = max(min(max_length // 2, max_length - 2), max_length - num_text, 0)
    context = min(num_context, max(room - num_prefix, room - room // 2))
    return min(num_prefix, room - context), context
