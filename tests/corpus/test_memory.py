"""Large input in bounded memory, measured in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

MEBIBYTE = 2**20

PROGRAM = """
import json, pathlib, resource, sys
import pyarrow
from ttt_adapt.config import ChunkSettings, CorpusSettings
from ttt_adapt.corpus import ReadProblems, chunk_documents, read_documents

def peak_kib():
    # Linux hands a child its parent's ru_maxrss; VmHWM is this program's own.
    status = pathlib.Path("/proc/self/status")
    if status.is_file():
        return int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak_kib()
found = ReadProblems()
documents = read_documents(CorpusSettings(**json.loads(sys.argv[1])), problems=found)
num_passages = sum(1 for _ in chunk_documents(documents, ChunkSettings()))
print(json.dumps([num_passages, found.num_bytes, found.num_skipped, (peak_kib() - before) / 1024]))
"""


def measure(**values: object) -> tuple[int, int, int, float]:
    """Passages, bytes of text, skipped records, growth of the peak in MiB."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(values)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    num_passages, num_bytes, num_skipped, growth = json.loads(output)
    return num_passages, num_bytes, num_skipped, growth


@pytest.mark.parametrize("name", ["big.jsonl", "big.jsonl.zst", "big.txt"])
def test_one_document_of_50_megabytes(tmp_path: Path, name: str) -> None:
    text = "All work and no play makes for long documents.\n" * (50 * 10**6 // 47)
    data = text.encode() if name.endswith(".txt") else json.dumps({"text": text}).encode()
    (tmp_path / name).write_bytes(zstandard.compress(data) if name.endswith(".zst") else data)
    num_passages, num_bytes, num_skipped, growth = measure(path=str(tmp_path / name))
    assert num_bytes == len(text)
    assert num_passages > len(text) // 1200
    assert num_skipped == 0
    assert growth < 260


def bomb(path: Path, mebibytes: int, tail: bytes) -> Path:
    packer = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as stream:
        for _ in range(mebibytes):
            stream.write(packer.compress(bytes(MEBIBYTE)))
        stream.write(packer.compress(tail))
        stream.write(packer.flush())
    return path


def test_a_bomb_costs_one_line(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.jsonl.zst", 512, b'\n{"text": "after it"}\n')
    assert path.stat().st_size < MEBIBYTE
    _, num_bytes, num_skipped, growth = measure(
        path=str(path), on_error="skip", max_document_bytes=4 * MEBIBYTE
    )
    assert (num_bytes, num_skipped) == (8, 1)
    assert growth < 60


def test_a_bomb_of_text(tmp_path: Path) -> None:
    bomb(tmp_path / "a.txt.zst", 512, b"")
    (tmp_path / "b.txt").write_text("x", encoding="utf-8")
    _, num_bytes, num_skipped, growth = measure(
        path=str(tmp_path), on_error="skip", max_document_bytes=4 * MEBIBYTE
    )
    assert (num_bytes, num_skipped) == (1, 1)
    assert growth < 60


def test_importing_the_room_is_light() -> None:
    program = (
        "import sys, ttt_adapt.corpus;"
        "heavy = {'torch', 'faiss', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)) or None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
