"""This machine: threads, processor features, devices, seeds, versions."""

import os
import platform
import random
import subprocess
import sys
from pathlib import Path

import faiss
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt import runtime
from ttt_adapt.errors import ModelError, SettingsError


def test_threads_of_both_runtimes_are_set() -> None:
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    try:
        for number in (1, 2, 1):
            runtime.set_num_threads(number)
            assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == (number, number)
    finally:
        torch.set_num_threads(before[0])
        faiss.omp_set_num_threads(before[1])


@pytest.mark.parametrize("number", [0, -1])
def test_no_threads_at_all_is_a_mistake(number: int) -> None:
    with pytest.raises(SettingsError, match=f"num_threads: expected at least 1, found {number}"):
        runtime.set_num_threads(number)


def test_processor_features_are_those_linux_reports() -> None:
    path = Path("/proc/cpuinfo")
    flags = runtime.cpu_flags()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    assert all(flag in text.split() for flag in flags)
    assert runtime.has_native_bfloat16() == bool({"avx512_bf16", "amx_bf16", "bf16"} & flags)


def test_auto_names_a_device_that_torch_can_use() -> None:
    name = runtime.resolve_device("auto")
    assert name == ("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.zeros(1, device=name).item() == 0.0
    assert runtime.resolve_device("cpu") == "cpu"


def test_a_device_nobody_has_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown device 'abacus'; use auto, cpu or cuda"):
        runtime.resolve_device("abacus")
    missing = torch.cuda.device_count()
    with pytest.raises(ModelError, match=f"device 'cuda:{missing}': this machine has"):
        runtime.resolve_device(f"cuda:{missing}")


@given(st.integers(0, 2**63 - 1), st.lists(st.one_of(st.integers(), st.text(max_size=8))))
@settings(deadline=None)
def test_derived_seeds_fit_every_generator(seed: int, parts: list[str | int]) -> None:
    derived = runtime.derived_seed(seed, *parts)
    assert derived == runtime.derived_seed(seed, *parts)
    assert 0 <= derived < 2**63
    random.Random(derived)
    torch.Generator().manual_seed(derived)


def test_derived_seeds_are_the_same_in_every_process() -> None:
    code = "from ttt_adapt.runtime import derived_seed; print(derived_seed(7, 'query', 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == runtime.derived_seed(7, "query", 3) == 8259447163220547873


def test_derived_seeds_differ_between_queries_and_runs() -> None:
    seeds = {runtime.derived_seed(run, f"query-{n}") for run in range(20) for n in range(50)}
    assert len(seeds) == 1000
    # Where one part ends and the next begins matters.
    assert runtime.derived_seed(1, "ab", "c") != runtime.derived_seed(1, "a", "bc")


def test_versions_name_what_a_result_depends_on() -> None:
    found = runtime.versions()
    assert found["torch"] == torch.__version__
    assert found["python"] == sys.version.split()[0]
    assert set(runtime.PACKAGES) | {"python", "ttt-adapt"} == set(found)
    assert all(found.values())


def test_processors_are_those_this_process_may_use() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from ttt_adapt.runtime import num_cpus; print(num_cpus())"
    )
    if hasattr(os, "sched_setaffinity"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) == 1
    assert runtime.num_cpus() >= 1


def test_keeping_freed_memory_takes_effect_under_glibc() -> None:
    code = "from ttt_adapt.runtime import keep_freed_memory as k; print(k(), k())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 1
    if platform.libc_ver()[0] == "glibc":
        assert done.stdout.split() == ["True", "True"]
