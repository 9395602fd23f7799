"""pile_all: weights, names, published numbers."""

import pytest

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.pile import (
    PILE_WEIGHTS,
    are_pile_subsets,
    pile_average,
    pile_subset,
    pile_weights,
)

# Bits per byte of GPT-2 large before learning and after 50 neighbours, as TTT-NN's published
# results have them, and their pile_all.
GPT2_LARGE = {
    "pile_arxiv": (1.14104, 0.98805),
    "pile_bookcorpus2": (0.95533, 0.99856),
    "pile_books3": (1.03525, 1.01389),
    "pile_dm-mathematics": (1.42628, 0.99253),
    "pile_enron": (1.43844, 0.72180),
    "pile_europarl": (1.96329, 1.15077),
    "pile_freelaw": (0.88975, 0.72172),
    "pile_github": (1.95381, 0.50652),
    "pile_gutenberg": (1.20739, 1.17765),
    "pile_hackernews": (1.29588, 1.08630),
    "pile_nih-exporter": (0.78067, 0.63061),
    "pile_opensubtitles": (1.15350, 0.74765),
    "pile_openwebtext2": (0.95157, 0.88036),
    "pile_philpapers": (1.22427, 1.06746),
    "pile_pile-cc": (0.95522, 0.88405),
    "pile_pubmed-abstracts": (0.81664, 0.73613),
    "pile_pubmed-central": (0.90380, 0.78931),
    "pile_stackexchange": (1.09386, 0.87700),
    "pile_ubuntu-irc": (1.27001, 1.12935),
    "pile_uspto": (0.75120, 0.56985),
    "pile_wikipedia": (0.97731, 0.81489),
    "pile_youtubesubtitles": (1.51075, 1.41610),
}
PUBLISHED_PILE_ALL = (1.07243, 0.85373)


def test_22_subsets_whose_weights_sum_to_100() -> None:
    assert len(PILE_WEIGHTS) == 22
    assert sum(PILE_WEIGHTS.values()) == pytest.approx(100.0)


@pytest.mark.parametrize("point", [0, 1])
def test_published_pile_all_follows_from_published_subsets(point: int) -> None:
    average = pile_average({name: values[point] for name, values in GPT2_LARGE.items()})
    assert average.bits_per_byte == pytest.approx(PUBLISHED_PILE_ALL[point], abs=2e-5)
    assert average.weights_covered == pytest.approx(100.0)
    assert (average.num_subsets, average.missing) == (22, ())


def test_missing_subsets_are_said_and_weights_scaled() -> None:
    average = pile_average({"Pile-CC": 1.0, "Github": 2.0})
    assert average.weights_covered == pytest.approx(18.11 + 7.59)
    assert average.bits_per_byte == pytest.approx((18.11 + 2 * 7.59) / (18.11 + 7.59))
    assert average.num_subsets == 2
    assert len(average.missing) == 20
    assert "ArXiv" in average.missing


def test_names_are_understood_in_both_spellings() -> None:
    assert {pile_subset(name) for name in GPT2_LARGE} == set(PILE_WEIGHTS)
    assert all(pile_subset(name) == name for name in PILE_WEIGHTS)
    assert pile_subset("Enron Emails") == pile_subset("pile_enron") == "Enron Emails"
    assert pile_subset("pile-cc") == "Pile-CC"
    assert pile_subset("Novels-fr") is None
    assert are_pile_subsets(["ArXiv", "pile_github"])
    assert not are_pile_subsets(["ArXiv", ""])
    assert not are_pile_subsets([])


def test_refusals() -> None:
    with pytest.raises(UserError, match="'Novels-fr' is not a subset of the Pile"):
        pile_average({"ArXiv": 1.0, "Novels-fr": 1.0})
    with pytest.raises(UserError, match="'ArXiv' and 'pile_arxiv' are the same subset"):
        pile_weights(["ArXiv", "pile_arxiv"])
    with pytest.raises(UserError, match="at least one subset"):
        pile_weights([])
