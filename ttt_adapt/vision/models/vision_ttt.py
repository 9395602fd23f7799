"""Vision-TTT: plain vision models of Vittt blocks (Kong et al. 2026, arXiv 2603.00518)."""

from typing import ClassVar

from torch import nn

from ttt_adapt.vision.models.base import VisionModel, init_linear
from ttt_adapt.vision.models.heads import DropPath
from ttt_adapt.vision.models.settings import VisionModelSettings, VisionTTTSettings
from ttt_adapt.vision.models.vittt_block import VitttBlock


class VisionTTT(VisionModel):
    """Images as data sets: each token teaches an inner model, which then answers it.

    Args:
        settings: see :class:`VisionTTTSettings`.
        architecture: the registered name.
    """

    family: ClassVar[str] = "vision_ttt"
    settings_kind: ClassVar[type[VisionModelSettings]] = VisionTTTSettings

    def _make_block(self, drop_path: DropPath) -> nn.Module:
        assert isinstance(self.settings, VisionTTTSettings)
        block = VitttBlock(self.settings, drop_path)
        block.apply(init_linear)
        return block


DESIGN_ROUTE = {
    "ttt_layer": {
        "share_qk": False, "gate": False, "conv1d": False, "dual": False, "dwconv": False,
    },
    "share_qk": {"gate": False, "conv1d": False, "dual": False, "dwconv": False},
    "gate": {"conv1d": False, "dual": False, "dwconv": False},
    "conv1d": {"dual": False, "dwconv": False},
    "dual": {"dwconv": False},
    "dwconv": {},
}  # fmt: skip
"""Table 3 of the paper from its first row to its last: what each row changes in the whole model, for
``create_model("vision_ttt_tiny", **DESIGN_ROUTE["conv1d"])``."""
