"""Where image tokens and class tokens stand in a sequence.

Shape legend: B images, S sequence (image and class tokens), T image tokens, n class tokens, D width.
"""

from dataclasses import dataclass

import torch

from ttt_adapt.vision.models.settings import Pool

NUM_CLASS_TOKENS: dict[Pool, int] = {
    "mean": 0,
    "max": 0,
    "head_token": 1,
    "mid_token": 1,
    "double_token": 2,
}


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """A grid of image tokens, row by row, with class tokens among them.

    Attributes:
        height: rows of the grid.
        width: columns of the grid.
        class_positions: places of class tokens in the sequence, ascending.
    """

    height: int
    width: int
    class_positions: tuple[int, ...] = ()

    @property
    def num_image_tokens(self) -> int:
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        return self.num_image_tokens + len(self.class_positions)

    def reversed(self) -> "TokenLayout":
        """The same of the sequence from last to first."""
        last = self.num_tokens - 1
        return TokenLayout(
            self.height, self.width, tuple(last - place for place in self.class_positions[::-1])
        )

    def image_tokens(self, tokens_BSD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]``, without the class tokens (a view where there are none)."""
        if not self.class_positions:
            return tokens_BSD
        return torch.cat(self._segments(tokens_BSD), dim=1)

    def class_tokens(self, tokens_BSD: torch.Tensor) -> torch.Tensor:
        """``[B, n, D]``."""
        return tokens_BSD[:, list(self.class_positions)]

    def join(self, image_BTD: torch.Tensor, class_BnD: torch.Tensor) -> torch.Tensor:
        """``[B, S, D]``: what :meth:`image_tokens` and :meth:`class_tokens` took apart."""
        if not self.class_positions:
            return image_BTD
        parts: list[torch.Tensor] = []
        taken = 0
        for index, place in enumerate(self.class_positions):
            count = place - index - taken
            parts += [image_BTD[:, taken : taken + count], class_BnD[:, index : index + 1]]
            taken += count
        return torch.cat([*parts, image_BTD[:, taken:]], dim=1)

    def grid(self, tokens_BSD: torch.Tensor) -> torch.Tensor:
        """Image tokens as ``[B, D, height, width]``, without copying where there is no class token."""
        image = self.image_tokens(tokens_BSD)
        shaped = image.reshape(image.shape[0], self.height, self.width, image.shape[2])
        return shaped.permute(0, 3, 1, 2)

    def _segments(self, tokens_BSD: torch.Tensor) -> list[torch.Tensor]:
        starts = [0, *(place + 1 for place in self.class_positions)]
        ends = [*self.class_positions, tokens_BSD.shape[1]]
        return [tokens_BSD[:, start:end] for start, end in zip(starts, ends, strict=True)]


def class_positions(pool: Pool, num_image_tokens: int) -> tuple[int, ...]:
    """Places of a classification head's class tokens among so many image tokens: before them, after
    half of them (as Vim has it), or one before and one after."""
    return {
        "mean": (),
        "max": (),
        "head_token": (0,),
        "mid_token": (num_image_tokens // 2,),
        "double_token": (0, num_image_tokens + 1),
    }[pool]
