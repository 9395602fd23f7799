"""`ttt-adapt doctor`: this machine, what is installed, what is missing."""

from typing import Any

from ttt_adapt.cli.console import Json, guarded, print_json, print_table


@guarded
def doctor(as_json: Json = False) -> None:
    """Versions, threads, processor features, caches, and what is missing.

    Example: ttt-adapt doctor
    """
    from ttt_adapt.doctor import examine

    found: dict[str, Any] = examine()
    if as_json:
        print_json(found)
        return
    for section, values in found.items():
        if isinstance(values, dict):
            print_table(section, ["", ""], [[key, str(value)] for key, value in values.items()])
        else:
            print_table(section, [""], [[str(line)] for line in values or ["none"]])
