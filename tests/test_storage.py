"""Files are whole or not there, also when the writer is killed; manifests notice every change."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.storage import (
    atomic_path,
    atomic_write,
    file_manifest,
    manifest_problems,
    remove_orphans,
    sha256_bytes,
    sha256_file,
    stable_hash,
    temporary_sibling,
    write_json,
)

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

# Rewrites a file without end: whenever it dies, most likely in the middle of a write.
WRITER = """
import sys
from pathlib import Path
from ttt_adapt.storage import atomic_write
path, number = Path(sys.argv[1]), 0
while True:
    number += 1
    with atomic_write(path) as stream:
        for _ in range(64):
            stream.write(bytes([number % 256]) * 65536)
            stream.flush()
    if number == 1:
        print("ready", flush=True)
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_hashes() -> None:
    assert sha256_bytes(b"") == EMPTY


def test_a_files_hash_is_its_contents(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == sha256_bytes(data)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))
@settings(deadline=None)
def test_a_stable_hash_ignores_the_order_of_keys(value: dict[str, Any]) -> None:
    turned = dict(reversed(list(value.items())))
    assert stable_hash(value) == stable_hash(turned) == stable_hash(json.loads(json.dumps(value)))
    assert stable_hash(value) != stable_hash({**value, "another key": 1, "": None})


def test_a_file_appears_whole_and_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    with atomic_write(path) as stream:
        stream.write(b"half")
        stream.flush()
        assert not path.exists()
        stream.write(b" and half")
    assert path.read_bytes() == b"half and half"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert names_in(path.parent) == ["file.bin"]


def test_a_private_writer_leaves_a_file_others_can_read(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_bytes(b"x")
        temporary.chmod(0o600)
    (tmp_path / "plain").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_umask_is_obeyed_and_never_touched(tmp_path: Path) -> None:
    """Threads share a umask: one that asks for it by setting it opens the others' files."""
    stop, modes = threading.Event(), set()

    def make_files() -> None:
        number = 0
        while not stop.is_set() and number < 1000:
            number += 1
            path = tmp_path / f"plain-{number}"
            path.touch()
            modes.add(stat.S_IMODE(path.stat().st_mode))

    before = os.umask(0o027)
    try:
        thread = threading.Thread(target=make_files)
        thread.start()
        for _ in range(100):
            write_json(tmp_path / "a.json", {})
        stop.set()
        thread.join()
        assert modes == {0o640}
        assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640
    finally:
        os.umask(before)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_write(path, "w") as stream:
        stream.write("new")
        stream.flush()
        raise error
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"key": "é", "rows": [1, 2]})
    with pytest.raises(TypeError):
        write_json(path, {"key": object()})
    assert path.read_text(encoding="utf-8") == '{\n "key": "é",\n "rows": [\n  1,\n  2\n ]\n}\n'
    assert names_in(tmp_path) == ["value.json"]


def test_a_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "file"):
        pass
    assert names_in(tmp_path) == []


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from ttt_adapt.storage import atomic_write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "with atomic_write(Path(sys.argv[1])) as stream: stream.write(bytes(10**6))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr
    assert (tmp_path / "file").read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    num_orphans = 0
    for attempt in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            while attempt % 2 == 0 and not list(tmp_path.glob("file.partial-*")):
                pass
            assert remove_orphans(tmp_path) == [], "the writer lives"
            writer.send_signal(signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
        content = path.read_bytes()
        assert len(content) == 64 * 65536
        assert len(set(content)) == 1, "one write, not a mixture of two"
        num_orphans += len(remove_orphans(tmp_path))
        assert names_in(tmp_path) == ["file"]
    assert num_orphans <= 4


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


def test_orphans_of_the_dead_are_removed_whatever_they_are(tmp_path: Path) -> None:
    dead = dead_process()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    folder = tmp_path / "folder"
    (folder / f"step.partial-{dead}-0123abcd").mkdir(parents=True)
    (folder / f"step.partial-{dead}-0123abcd" / "weights").touch()
    (folder / f"file.partial-{dead}-0123abcd").touch()
    (folder / f"array.partial-{dead}-0123abcd.npy").touch()
    (folder / f"link.partial-{dead}-0123abcd").symlink_to(elsewhere)
    (folder / "huge.partial-99999999999999999999-0123abcd").touch()
    assert len(remove_orphans(folder)) == 5
    assert names_in(folder) == []
    assert names_in(elsewhere) == ["precious"]


def test_what_is_no_orphan_stays(tmp_path: Path) -> None:
    dead = dead_process()
    mine = temporary_sibling(tmp_path / "mine")
    names = [
        mine.name,
        mine.name + ".npy",
        f"parents.partial-{os.getppid()}-0123abcd",
        "my.partial-notes.txt",
        "my.partial-2024-draft.txt",
        f"file.partial-{dead}",
        f"file.partial-{dead}-0123abcdef",
        "file",
    ]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / f"file.partial-{dead}-0123abcd").touch()
    assert remove_orphans(tmp_path) == []
    assert names_in(tmp_path) == sorted([*names, "deep"])


def test_an_orphan_of_a_process_that_had_our_number_is_removed(tmp_path: Path) -> None:
    """In a container every run may be process 1."""
    (tmp_path / f"file.partial-{os.getpid()}-0123abcd").touch()
    assert len(remove_orphans(tmp_path)) == 1


def test_orphans_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert remove_orphans(tmp_path / "absent") == []


@pytest.fixture
def sound(tmp_path: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder of two files, and its manifest."""
    folder = tmp_path / "sound"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"abc")
    (folder / "deep" / "b").write_bytes(b"")
    return folder, file_manifest(folder, ["a", "deep/b"])


def test_a_sound_folder_has_no_problems(sound: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, manifest = sound
    assert manifest["deep/b"] == {"bytes": 0, "sha256": EMPTY}
    assert manifest_problems(folder, manifest, hashes=True) == []
    assert manifest_problems(folder, {}, hashes=True) == []


def test_every_change_is_a_problem(sound: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, manifest = sound
    (folder / "a").write_bytes(b"abd")
    (folder / "deep" / "b").write_bytes(b"!")
    assert manifest_problems(folder, manifest, hashes=False) == ["deep/b: 1 bytes, expected 0"]
    assert manifest_problems(folder, manifest, hashes=True) == [
        "a: SHA-256 differs from the manifest's",
        "deep/b: 1 bytes, expected 0",
    ]
    shutil.rmtree(folder / "deep")
    (folder / "a").unlink()
    (folder / "a").mkdir()
    assert manifest_problems(folder, manifest, hashes=True) == ["a: missing", "deep/b: missing"]


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "deep/../../secret", "way-out", ".."]
)
def test_names_that_lead_outside_are_never_opened(
    sound: tuple[Path, dict[str, dict[str, Any]]], name: str
) -> None:
    folder, _ = sound
    # Whoever opens a named pipe to read waits for ever: this test ends only if nobody does.
    os.mkfifo(folder.parent / "secret")
    (folder / "way-out").symlink_to(folder.parent / "secret")
    entry = {"bytes": 0, "sha256": EMPTY}
    (problem,) = manifest_problems(folder, {name: entry}, hashes=True)
    assert problem == f"{name}: points outside {folder}"


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("a", {}, "a: expected bytes and sha256 in the manifest, found {}"),
        ("a", None, "a: expected bytes and sha256 in the manifest, found None"),
        ("a", {"bytes": 3}, "a: expected bytes and sha256 in the manifest"),
        ("a", {"bytes": "3", "sha256": ""}, "a: 3 bytes, expected 3"),
        ("a\0b", {"bytes": 3, "sha256": ""}, "cannot be read: "),
        ("", {"bytes": 3, "sha256": ""}, ": missing"),
        ("loop", {"bytes": 3, "sha256": ""}, "loop: "),
        ("pipe", {"bytes": 0, "sha256": EMPTY}, "pipe: missing"),
        ("x" * 300, {"bytes": 3, "sha256": ""}, "x: "),
    ],
)
def test_a_damaged_manifest_is_a_problem_not_a_crash(
    sound: tuple[Path, dict[str, dict[str, Any]]], name: str, entry: Any, expected: str
) -> None:
    folder, _ = sound
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (problem,) = manifest_problems(folder, {name: entry}, hashes=True)
    assert expected in problem
