from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.indexes.known_ids import KnownIds

IDS = st.lists(st.lists(st.text(max_size=2), max_size=6), max_size=12)


@settings(deadline=None)
@given(IDS)
def test_equals_a_set(calls: list[list[str]]) -> None:
    known, reference = KnownIds(), set[str]()
    for ids in calls:
        assert known.contains(ids).tolist() == [value in reference for value in ids]
        expected = []
        for value in ids:
            expected.append(value in reference)
            reference.add(value)
        assert known.add(ids).tolist() == expected
        assert len(known) == len(reference)


def test_many() -> None:
    known = KnownIds()
    for start in range(0, 5000, 100):
        assert not known.add([str(value) for value in range(start, start + 100)]).any()
    assert known.add(["17", "5000", "4999", "5000"]).tolist() == [True, False, True, True]
