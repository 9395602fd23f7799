"""The demonstration's data: real files of this interpreter, nothing held out left in the corpus."""

import sysconfig
from pathlib import Path

from ttt_adapt.demo import CORPUS_BYTES, NUM_TEST, NUM_VALIDATION, plan_demo, split_files


def test_held_out_modules_are_in_no_copy_in_the_corpus() -> None:
    parts = split_files(0)
    assert len(parts["validation"]) == NUM_VALIDATION and len(parts["test"]) == NUM_TEST
    held_out = {file.module for name in ("validation", "test") for file in parts[name]}
    assert len(held_out) == NUM_VALIDATION + NUM_TEST
    assert not held_out & {file.module for file in parts["corpus"]}
    assert len({file.id for file in parts["corpus"]}) == len(parts["corpus"])
    assert sum(len(file.text) for file in parts["corpus"]) <= CORPUS_BYTES


def test_corpus_repeats_itself_as_real_ones_do() -> None:
    modules = [file.module for file in split_files(0)["corpus"]]
    assert len(set(modules)) < len(modules)


def test_files_are_this_interpreters() -> None:
    paths = sysconfig.get_paths()
    roots = {"standard library": paths["stdlib"], "packages": paths["purelib"]}
    for file in split_files(0)["corpus"][::20]:
        name = file.id.removeprefix(f"{file.subset}/")
        assert (Path(roots[file.subset]) / name).read_text(encoding="utf-8") == file.text


def test_split_depends_on_the_seed_alone() -> None:
    assert split_files(1) == split_files(1)
    assert split_files(1)["test"] != split_files(2)["test"]
    assert plan_demo(3) == plan_demo(3)
