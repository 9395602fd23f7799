"""Source trees: what is read, in which order, and what a .gitignore keeps out."""

import os
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.errors import CorpusError


def fill(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def ids(root: Path, problems: ReadProblems | None = None, **values: Any) -> list[str]:
    asked = CorpusSettings(path=str(root), **({"format": "tree"} | values))
    return [document.id for document in read_documents(asked, problems=problems)]


def names(*paths: str) -> dict[str, str]:
    return dict.fromkeys(paths, "text\n")


def test_documents_of_a_tree(tmp_path: Path) -> None:
    fill(tmp_path, {"pkg/mod.py": "x = 1\n", "README.md": "# r\n", "pkg/__init__.py": ""})
    found = ReadProblems()
    asked = CorpusSettings(path=str(tmp_path))
    first, second = read_documents(asked, problems=found)
    assert (first.id, first.text) == ("README.md", "# r\n")
    assert (second.id, second.source, second.text) == ("pkg/mod.py", "pkg/mod.py", "x = 1\n")
    assert (found.num_files, found.num_empty) == (3, 1)


def test_order_is_that_of_whole_paths(tmp_path: Path) -> None:
    paths = ["a.py", "a/b.py", "a-b.py", "a/b/c.py", "A.py", "a/é.py", "b", "a0"]
    fill(tmp_path, names(*paths))
    assert ids(tmp_path) == sorted(paths)


def test_default_excludes(tmp_path: Path) -> None:
    kept = [
        "build.py",
        "so",
        ".map",
        "src/a.py",
        "src/builder.py",
        ".github/ci.yml",
        "distance/x.c",
    ]
    left_out = [
        ".git/config", "sub/.git/HEAD", "__pycache__/a.py", "a/node_modules/x/index.js",
        ".venv/lib/x.py", "build/x.py", "src/dist/x.py", "x.egg-info/PKG-INFO", "lib.so",
        "lib.so.1", "a.pyc", "image.png", "weights.safetensors", "paper.pdf", "data.parquet",
        "SCAN.PDF", "jquery.min.js",
    ]  # fmt: skip
    fill(tmp_path, names(*kept, *left_out))
    assert ids(tmp_path) == sorted(kept)
    back = ids(tmp_path, exclude=("!build/", "*.c"))
    assert back == [
        ".github/ci.yml",
        ".map",
        "build.py",
        "build/x.py",
        "so",
        "src/a.py",
        "src/builder.py",
    ]


def test_include(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py", "b.c", "pkg/c.py", "pkg/d.txt", "docs/e.md", "build/f.py"))
    assert ids(tmp_path, include=("*.py",)) == ["a.py", "pkg/c.py"]
    assert ids(tmp_path, include=("/pkg/", "*.c"), exclude=("d.*",)) == ["b.c", "pkg/c.py"]
    with pytest.raises(CorpusError, match=r"no document found \(read as tree: empty\)"):
        ids(tmp_path, include=("*.rs",))


def test_gitignore_files_of_the_tree(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {
            ".gitignore": "*.log\n/secret/\n# comment\n\n!keep.log\nout\n!\nlast.txt\n",
            "sub/.gitignore": "!special.log\n/only_here.txt\n",
            **names(
                "a.log", "keep.log", "secret/x.py", "sub/secret/x.py", "sub/special.log",
                "sub/other.log", "sub/only_here.txt", "only_here.txt", "sub/deep/only_here.txt",
                "out/x.py", "sub/out", "sub/deep/special.log", "last.txt",
            ),
        },
    )  # fmt: skip
    assert ids(tmp_path) == [
        ".gitignore",
        "keep.log",
        "only_here.txt",
        "sub/.gitignore",
        "sub/deep/only_here.txt",
        "sub/deep/special.log",
        "sub/secret/x.py",
        "sub/special.log",
    ]


def test_nothing_returns_from_an_ignored_directory(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "gen/\n!gen/keep.py\n", "gen/keep.py": "x", "a.py": "x"})
    assert ids(tmp_path, exclude=(".gitignore",)) == ["a.py"]


def test_gitignore_files_that_list_what_to_keep(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {
            "all/.gitignore": "*\n!*/\n!*.py\n",
            "in [x]/.gitignore": "data/**\n!data/keep.txt\n/top.txt\n\\!odd\nspaced\\ \n",
            **names(
                "all/a.py", "all/a.c", "all/sub/b.py", "all/sub/b.c",
                "in [x]/data/keep.txt", "in [x]/data/x.txt", "in [x]/data/sub/keep.txt",
                "in [x]/top.txt", "in [x]/sub/top.txt", "in [x]/!odd", "in [x]/sub/!odd",
                "in [x]/spaced ", "in [x]/spaced", "top.txt", "data/x.txt",
            ),
        },
    )  # fmt: skip
    assert ids(tmp_path) == [
        "all/a.py",
        "all/sub/b.py",
        "data/x.txt",
        "in [x]/.gitignore",
        "in [x]/data/keep.txt",
        "in [x]/spaced",
        "in [x]/sub/top.txt",
        "top.txt",
    ]


def test_a_gitignore_that_is_no_utf8(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py", "b.py"))
    (tmp_path / ".gitignore").write_bytes(b"caf\xe9\nb.py\n")
    assert ids(tmp_path, exclude=(".gitignore",)) == ["a.py"]


def test_binary_files_are_left_out_and_counted(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py"))
    (tmp_path / "blob").write_bytes(b"text" + b"\0" + b"\xff" * 100)
    (tmp_path / "late").write_bytes(b"x" * 8192 + b"\0")
    found = ReadProblems()
    assert ids(tmp_path, found) == ["a.py", "late"]
    assert (found.num_binary, found.num_skipped) == (1, 0)
    assert "1 binary file left out" in found.summary()


def test_a_huge_binary_file_is_no_error(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py"))
    (tmp_path / "blob").write_bytes(b"\0" * 100_000)
    assert ids(tmp_path, max_document_bytes=1000) == ["a.py"]


def test_malformed_files(tmp_path: Path) -> None:
    fill(tmp_path, {"a.py": "ok\n", "long.py": "x" * 5000})
    (tmp_path / "latin.py").write_bytes(b"# one\n# caf\xe9\n")
    found = ReadProblems()
    assert ids(tmp_path, found, on_error="skip", max_document_bytes=4000) == ["a.py"]
    assert [problem.location for problem in found.problems] == ["latin.py", "long.py"]
    assert found.problems[0].reason.startswith("invalid UTF-8 at byte 11, line 2: 0xe9")
    with pytest.raises(CorpusError, match=r"^latin.py: invalid UTF-8 at byte 11, line 2"):
        ids(tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", names("private.txt"))
    root = fill(tmp_path / "root", names("real/a.py"))
    (root / "loop").symlink_to(root)
    (root / "real" / "up").symlink_to("..")
    (root / "again").symlink_to("real")
    (root / "b.py").symlink_to("real/a.py")
    (root / "leak").symlink_to(outside)
    (root / "leak.txt").symlink_to(outside / "private.txt")
    (root / "dangling").symlink_to("nowhere")
    assert ids(root) == ["real/a.py"]
    (tmp_path / "entry").symlink_to(root)
    assert ids(tmp_path / "entry") == ["real/a.py"]


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py"))
    os.mkfifo(tmp_path / "pipe")
    assert ids(tmp_path) == ["a.py"]


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py"))
    with open(os.fsencode(tmp_path) + b"/caf\xe9.py", "w", encoding="utf-8") as stream:  # noqa: PTH123
        stream.write("x")
    assert ids(tmp_path) == ["a.py", "caf\\xe9.py"]


def test_a_file_and_a_folder_that_vanish(tmp_path: Path) -> None:
    fill(tmp_path, names("a.py", "b.py", "c/d.py", "e.py"))
    found = ReadProblems()
    asked = CorpusSettings(path=str(tmp_path), on_error="skip")
    documents = read_documents(asked, problems=found)
    next(documents)
    (tmp_path / "b.py").unlink()
    (tmp_path / "c" / "d.py").unlink()
    (tmp_path / "c").rmdir()
    assert [document.id for document in documents] == ["e.py"]
    assert [problem.location for problem in found.problems] == ["b.py", "c/"]
    assert "cannot be read: No such file" in found.problems[0].reason
    assert "cannot be listed: No such file" in found.problems[1].reason


def test_max_documents(tmp_path: Path) -> None:
    fill(tmp_path, names("a", "b", "c"))
    assert ids(tmp_path, max_documents=2) == ["a", "b"]
