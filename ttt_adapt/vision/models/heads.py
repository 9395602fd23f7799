"""Five ways from a sequence to class scores (Vision-TTT, table 4), and stochastic depth.

Shape legend: B images, S sequence (image and class tokens), D width, n class tokens, K classes.
"""

import torch
from torch import nn

from ttt_adapt.vision.models.layout import NUM_CLASS_TOKENS, TokenLayout, class_positions
from ttt_adapt.vision.models.settings import Pool

HEAD_STD = 0.02


class ClassTokens(nn.Module):
    """Learned tokens put among the image tokens.

    Args:
        pool: the classification head they are for; heads that pool image tokens have none.
        dim: D.
    """

    def __init__(self, pool: Pool, dim: int) -> None:
        super().__init__()
        self.pool = pool
        self.weight: nn.Parameter | None = None
        if NUM_CLASS_TOKENS[pool]:
            self.weight = nn.Parameter(torch.empty(NUM_CLASS_TOKENS[pool], dim))
            nn.init.trunc_normal_(self.weight, std=HEAD_STD, a=-2 * HEAD_STD, b=2 * HEAD_STD)

    def forward(
        self, image_BTD: torch.Tensor, height: int, width: int
    ) -> tuple[torch.Tensor, TokenLayout]:
        """The whole sequence ``[B, S, D]`` and where everything stands in it."""
        layout = TokenLayout(height, width, class_positions(self.pool, image_BTD.shape[1]))
        if self.weight is None:
            return image_BTD, layout
        weight = self.weight.to(image_BTD.dtype).expand(image_BTD.shape[0], -1, -1)
        return layout.join(image_BTD, weight), layout


def pool_tokens(tokens_BSD: torch.Tensor, pool: Pool) -> torch.Tensor:
    """The vector to classify, ``[B, D]``, of a sequence after the last layer norm.

    Args:
        tokens_BSD: with the class tokens where this head puts them.
        pool: ``mean`` of all tokens; ``max``: the token of largest L2 norm, whole;
            ``head_token``, ``mid_token``: the class token; ``double_token``: the mean of the two,
            as Vim has it.
    """
    if pool == "mean":
        return tokens_BSD.mean(dim=1)
    if pool == "max":
        longest = tokens_BSD.float().square().sum(-1).argmax(dim=1)
        index = longest[:, None, None].expand(-1, 1, tokens_BSD.shape[2])
        return tokens_BSD.gather(1, index)[:, 0]
    places = class_positions(pool, tokens_BSD.shape[1] - NUM_CLASS_TOKENS[pool])
    return tokens_BSD[:, list(places)].mean(dim=1)


def make_classifier(dim: int, num_classes: int, init: str) -> nn.Module:
    """A linear classifier ``[B, D]`` to ``[B, K]``; of no classes, the identity."""
    if num_classes == 0:
        return nn.Identity()
    head = nn.Linear(dim, num_classes)
    if init == "zeros":
        nn.init.zeros_(head.weight)
    else:
        nn.init.trunc_normal_(head.weight, std=HEAD_STD, a=-2 * HEAD_STD, b=2 * HEAD_STD)
    nn.init.zeros_(head.bias)
    return head


class DropPath(nn.Module):
    """Leaves out a whole residual branch of some images while training, the others scaled up.

    Args:
        rate: probability of being left out (Huang et al. 2016, arXiv 1603.09382).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch_BSD: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0.0:
            return branch_BSD
        keep = torch.rand(branch_BSD.shape[0], 1, 1, device=branch_BSD.device) >= self.rate
        return branch_BSD * (keep.to(branch_BSD.dtype) / (1.0 - self.rate))

    def extra_repr(self) -> str:
        return f"{self.rate}"
