"""The room's public names, and what reading results must not load."""

import subprocess
import sys

import pytest

from ttt_adapt import evaluation


def test_every_public_name_loads() -> None:
    for name in evaluation.__all__:
        assert name.isupper() or getattr(evaluation, name).__name__ == name
    assert set(evaluation.__all__) <= set(dir(evaluation))
    with pytest.raises(AttributeError, match="has no attribute 'perplexity'"):
        _ = evaluation.perplexity


def test_names_do_not_hide_behind_modules() -> None:
    """A function named like its module would be replaced by it on import."""
    import ttt_adapt.evaluation.scoring
    import ttt_adapt.evaluation.summary  # noqa: F401

    for name in evaluation.__all__:
        assert not isinstance(getattr(evaluation, name), type(sys))


def test_summaries_need_no_torch() -> None:
    code = (
        "import sys; from ttt_adapt.evaluation import (Ledger, summarize, compare, read_results, "
        "paired_bootstrap, make_query, pile_average); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
