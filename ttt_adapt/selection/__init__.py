"""What to learn from: selectors over a query's candidates, judged by one posterior variance.

    from ttt_adapt.selection import sift
    selection = sift(candidates_KD, queries_MD, num_select=50, noise_var=0.01)

Every selector takes candidates and queries as matrices of one vector a row (numpy arrays or torch
tensors), keeps no state, writes to nothing it was given, and returns a
:class:`~ttt_adapt.types.Selection`.
"""

from ttt_adapt.selection.choosing import select, select_batch
from ttt_adapt.selection.diversity import mmr, uncertainty
from ttt_adapt.selection.greedy import sift
from ttt_adapt.selection.lazy import greedy_gap, sift_fast
from ttt_adapt.selection.posterior import Posterior, posterior_variance
from ttt_adapt.selection.relevance import nearest, nearest_distinct, random
from ttt_adapt.selection.stopping import adaptive_prefix

__all__ = [
    "Posterior",
    "adaptive_prefix",
    "greedy_gap",
    "mmr",
    "nearest",
    "nearest_distinct",
    "posterior_variance",
    "random",
    "select",
    "select_batch",
    "sift",
    "sift_fast",
    "uncertainty",
]
