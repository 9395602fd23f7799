"""The error tree: what a caller may catch, and how the command line exits."""

import inspect
import pickle

import pytest

from ttt_adapt import errors
from ttt_adapt.errors import BusyError, MissingDependencyError, TTTAdaptError, UserError

ALL = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_ours_and_documented(kind: type[TTTAdaptError]) -> None:
    assert issubclass(kind, TTTAdaptError)
    assert inspect.getdoc(kind)
    assert kind.__name__ in (errors.__doc__ or ""), "the tree in the module's docstring shows it"


@pytest.mark.parametrize("kind", ALL)
def test_exit_codes_tell_the_users_mistake_from_our_failure(kind: type[TTTAdaptError]) -> None:
    mendable = issubclass(kind, (UserError, MissingDependencyError, BusyError))
    assert kind.exit_code == (2 if mendable else 1)


def test_a_users_mistake_is_a_value_error() -> None:
    assert issubclass(UserError, ValueError)
    assert not issubclass(BusyError, ValueError)


@pytest.mark.parametrize("kind", ALL)
def test_errors_cross_process_borders(kind: type[TTTAdaptError]) -> None:
    error = pickle.loads(pickle.dumps(kind("expected one, found two")))
    assert type(error) is kind
    assert str(error) == "expected one, found two"


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if "Error" in line]
    drawn = [line.lstrip(" │├└─").split()[0] for line in lines if line.startswith("    ")]
    assert sorted(drawn) == sorted(kind.__name__ for kind in ALL)
