"""Builds and additions in processes of their own, killed with SIGKILL or out of disk space."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import BusyError, IndexFormatError
from ttt_adapt.indexes import Index, add_to_index, build_index, verify_index
from ttt_adapt.indexes.layout import LOCK, TIMINGS
from ttt_adapt.storage import TEMPORARY_MARK
from ttt_adapt.testing import HashedWords, sample_passages

SCRIPT = """
import resource, sys, time
from pathlib import Path
from ttt_adapt.config import IndexSettings
from ttt_adapt.indexes import BuildProgress, add_to_index, build_index
from ttt_adapt.testing import HashedWords, sample_passages

task, folder, factory, limit, delay_s = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))

def say(what, *rest):
    print(what, flush=True)

class Slow(HashedWords):
    def embed(self, texts, *, progress=None):
        say("shard")
        time.sleep(float(delay_s))
        return super().embed(texts, progress=progress)

progress = BuildProgress(on_stage=say)
try:
    if task == "add":
        passages = sample_passages(150, first=200)
        add_to_index(Path(folder), passages, Slow(), progress=progress)
    else:
        settings = IndexSettings(shard_passages=100, factory=factory, add_batch=130)
        origin = {"corpus": "words"}
        passages = sample_passages(250)
        build_index(passages, Slow(), Path(folder), settings, origin=origin, progress=progress)
except OSError as error:
    print(f"failed: {error}", flush=True)
    sys.exit(3)
print("done", flush=True)
"""


def start(
    task: str, folder: Path, factory: str, *, limit: int = 0, delay_s: float = 0.02
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, task, str(folder), factory, str(limit), str(delay_s)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_when(process: subprocess.Popen[str], word: str, count: int, wait_s: float) -> bool:
    """SIGKILL ``wait_s`` after the ``count``-th line ``word``; whether it came to that."""
    assert process.stdout is not None
    for line in process.stdout:
        count -= line.strip() == word
        if count == 0:
            # Wakes at once if the process ends before its time.
            deadline = time.perf_counter() + wait_s
            while time.perf_counter() < deadline and process.poll() is None:
                select.select([], [], [], wait_s / 20)
            break
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    return process.wait() == -signal.SIGKILL


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (LOCK, TIMINGS)
    }


def build(folder: Path, factory: str, num_documents: int = 250) -> None:
    settings = IndexSettings(shard_passages=100, factory=factory, add_batch=130)
    build_index(
        sample_passages(num_documents), HashedWords(), folder, settings, origin={"corpus": "words"}
    )


@pytest.mark.parametrize(
    ("factory", "seed", "moments"),
    [
        ("HNSW16", 0, ["shard", "shard", "add", "write", "write", "write"]),
        ("IVF8,Flat", 1, ["shard", "train", "write", "write"]),
    ],
)
def test_a_killed_build_continues_to_the_same_files(
    tmp_path: Path, factory: str, seed: int, moments: list[str]
) -> None:
    build(tmp_path / "whole", factory)
    generator = random.Random(seed)
    num_killed = 0
    for number, moment in enumerate(moments):
        count = 1 + number if moment == "shard" else 1
        wait_s = generator.uniform(0.0, 0.03 if moment == "shard" else 0.004)
        process = start("build", tmp_path / "index", factory)
        num_killed += kill_when(process, moment, count, wait_s)
        try:
            # The last kills may have come just after the manifest: then it must be whole.
            assert len(Index.open(tmp_path / "index")) == 750
        except IndexFormatError as error:
            assert "run the build again to continue it" in str(error)
    assert num_killed >= len(moments) - 2
    process = start("build", tmp_path / "index", factory, delay_s=0.0)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert output.count("shard") < 8
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")
    assert verify_index(tmp_path / "index") == []


def test_a_killed_addition_leaves_the_old_index(tmp_path: Path) -> None:
    build(tmp_path / "whole", "HNSW16")
    add_to_index(tmp_path / "whole", sample_passages(150, first=200), HashedWords())
    build(tmp_path / "index", "HNSW16")
    old = Index.open(tmp_path / "index").info.content_hash
    new = Index.open(tmp_path / "whole").info.content_hash
    for moment, wait_s in [("shard", 0.01), ("add", 0.0), ("write", 0.001), ("write", 0.003)]:
        kill_when(start("add", tmp_path / "index", ""), moment, 1, wait_s)
        assert verify_index(tmp_path / "index") == []
        assert Index.open(tmp_path / "index").info.content_hash in (old, new)
    add_to_index(tmp_path / "index", sample_passages(150, first=200), HashedWords())
    kept = contents(tmp_path / "index")
    # A kill between the switch and the removal of the previous FAISS file leaves that behind.
    kept.pop("faiss-0000.index", None)
    assert kept == contents(tmp_path / "whole")


def test_orphans_are_collected(tmp_path: Path) -> None:
    process = start("build", tmp_path, "Flat", delay_s=5.0)
    kill_when(process, "shard", 1, 0.0)
    for name in ("faiss-0000.index", "shards/00000.arrow", "manifest.json"):
        orphan = tmp_path / f"{name}{TEMPORARY_MARK}{os.getpid()}-00000000"
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"half")
    build(tmp_path, "Flat")
    assert not list(tmp_path.rglob(f"*{TEMPORARY_MARK}*"))


def test_two_builders(tmp_path: Path) -> None:
    process = start("build", tmp_path, "Flat", delay_s=30.0)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "shard":
        assert process.poll() is None
    with pytest.raises(BusyError, match="another process is writing this index; wait for it"):
        build(tmp_path, "Flat")
    process.kill()
    process.wait()
    process.stdout.close()
    # The lock died with its holder.
    build(tmp_path, "Flat")
    assert verify_index(tmp_path) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    # FAISS' file exceeds the limit on file sizes, everything else stays below it.
    limit = 750 * 32 * 4 + 20_000
    process = start("build", tmp_path / "index", "HNSW16", limit=limit, delay_s=0.0)
    output, _ = process.communicate()
    assert process.returncode == 3
    assert "failed: [Errno 27] File too large" in output
    assert not list((tmp_path / "index").glob("faiss*"))
    with pytest.raises(IndexFormatError, match="unfinished"):
        Index.open(tmp_path / "index")
    build(tmp_path / "index", "HNSW16")
    build(tmp_path / "whole", "HNSW16")
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")

    before = contents(tmp_path / "index")
    limit = (tmp_path / "index/faiss-0000.index").stat().st_size + 1000
    process = start("add", tmp_path / "index", "", limit=limit, delay_s=0.0)
    output, _ = process.communicate()
    assert process.returncode == 3
    assert "File too large" in output
    assert verify_index(tmp_path / "index") == []
    # Rows beyond the old index' may stay for the next addition; the old index is as it was.
    after = contents(tmp_path / "index")
    size = len(before["vectors.bin"])
    after["vectors.bin"] = after["vectors.bin"][:size]
    assert {name: after[name] for name in before} == before


def test_several_readers(tmp_path: Path) -> None:
    build(tmp_path, "IVF8,Flat")
    script = (
        "import sys; from pathlib import Path; from ttt_adapt.indexes import Index;"
        "index = Index.open(Path(sys.argv[1]));"
        "found = index.search(index.vectors([5, 6]), num_candidates=10);"
        "print(found.ids.tolist(), [p.id for p in index.passages(found.ids)])"
    )
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    index = Index.open(tmp_path)
    found = index.search(index.vectors([5, 6]), num_candidates=10)
    expected = f"{found.ids.tolist()} {[p.id for p in index.passages(found.ids)]}\n"
    assert [reader.communicate()[0] for reader in readers] == [expected, expected]
