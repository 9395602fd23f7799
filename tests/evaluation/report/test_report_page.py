"""The page itself: well-formed, self-contained, escaped, the same for the same input."""

import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ttt_adapt.evaluation.report import write_report
from ttt_adapt.evaluation.report.markup import Markup, clean, join, shorten, tag
from ttt_adapt.types import Prediction

RunWriter = Callable[..., Path]
ARMS = ("base", "random", "nearest", "sift", "in-context")
FIGURES = ["bits-per-byte.png", "subsets.png", "uncertainty.png", "cost.png"]
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Elements, ids and text of a page; an element closed out of order fails at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.pieces: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        for key, value in attributes:
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "src", "xlink:href", "action", "data", "poster", "srcset"):
                self.links.append(value or "")
            assert not key.startswith("on"), f"{key} on {name}"
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(name, attributes)
        if name not in VOID:
            self.handle_endtag(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())


def require_self_contained(page: Page) -> None:
    assert "script" not in page.tags
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert len(page.ids) == len(set(page.ids)), "ids are told apart between figures"
    targets = {link[1:] for link in page.links if link.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", page.source))
    assert targets <= set(page.ids)
    assert set(re.findall(r"url\((.)", page.source)) <= {"#"}
    assert "http" not in page.source
    assert "@import" not in page.source


def require_png(path: Path) -> None:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, pixels, size = 8, b"", (0, 0)
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        (checksum,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert zlib.crc32(kind + body) == checksum
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        pixels += body if kind == b"IDAT" else b""
        position += 12 + length
    assert size[0] > 800 and size[1] > 200
    assert len(set(zlib.decompress(pixels))) > 20, "a picture with something in it"


def test_five_arms(write_run: RunWriter, tmp_path: Path) -> None:
    written = write_report([write_run(arm) for arm in ARMS], tmp_path / "out", title="Five arms")
    assert written[0] == tmp_path / "out" / "report.html"
    assert [path.name for path in written[1:]] == FIGURES
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in written
    )
    for path in written[1:]:
        require_png(path)
    page = Page(written[0])
    require_self_contained(page)
    assert page.tags.count("svg") == 4 and page.tags.count("h1") == 1
    for arm in ARMS:
        assert page.text.count(arm) >= 3, arm
    for said in (
        "Five arms",
        "With sift, the best of 4 ways to adapt",
        "95% interval",
        "Against the next best, nearest",
        "llama-7m (abababababab)",
        "12 texts in 3 subsets",
        "1,234 passages, Flat",
        "full (retrieve with the text that is scored)",
        "torch 2.13.0",
        "Largest gain of sift: text-",
        "Median for sift: text-",
        "same text as 2",
        "No text failed and no learning stopped early.",
        "n = 12",
        '[data] path = "texts.jsonl"',
    ):
        assert said in page.text, said
    assert "prefers-color-scheme:dark" in page.source and "@media print" in page.source


def test_equal_input_gives_equal_bytes(write_run: RunWriter, tmp_path: Path) -> None:
    folders = [write_run(arm, num_queries=4) for arm in ("base", "sift")]
    first = write_report(folders, tmp_path / "one", num_resamples=50)
    # Another process: nothing may depend on hash seeds or on what was drawn before.
    code = (
        "import sys; from pathlib import Path; "
        "from ttt_adapt.evaluation.report import write_report; "
        "write_report([Path(p) for p in sys.argv[2:]], Path(sys.argv[1]), num_resamples=50)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "two"), *map(str, folders)]
    subprocess.run(command, check=True, timeout=60)
    for path in first:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_everything_is_escaped(
    write_run: RunWriter,
    make_predictions: Callable[..., list[Prediction]],
    failed: Callable[..., Prediction],
    tmp_path: Path,
) -> None:
    attack = "<script>alert('1')</script>\"&amp;<img src=x onerror=alert(2)>$x^2$ {0} \\1 \x00\x08"
    made = make_predictions("sift", subsets=(attack, "code"), text=attack)
    made[2] = failed(made[2], attack)
    folder = write_run(
        attack,
        folder="attack",
        made=made,
        info={"model": {"name": attack}, "versions": {"torch": attack}, "seed": attack},
        settings=f"# {attack}\n",
    )
    other = write_run("nearest", subsets=(attack, "code"))
    written = write_report([folder, other], tmp_path / "out", title=attack, num_resamples=50)
    page = Page(written[0])
    require_self_contained(page)
    assert page.text.count("<script>alert('1')</script>") > 10
    assert "\ufffd" in page.source and "\x00" not in page.source
    for path in written[1:]:
        require_png(path)


def test_text_in_any_script(
    write_run: RunWriter, make_predictions: Callable[..., list[Prediction]], tmp_path: Path
) -> None:
    chinese = "测试时训练：先检索，再学习，然后预测。" * 3
    made = make_predictions("sift", subsets=("中文维基", "日本語", "עברית 🎉"), text=chinese)
    folder = write_run("选择", folder="chinese", made=made)
    base = write_run("base", subsets=("中文维基", "日本語", "עברית 🎉"))
    written = write_report([base, folder], tmp_path / "out", title="报告 \ud800", num_resamples=50)
    page = Page(written[0])
    assert chinese in page.text
    svg = "".join(re.findall(r"<svg.*?</svg>", page.source, re.DOTALL))
    assert "中文维基" in svg and "选择" in svg, "text in charts stays text"
    assert "报告 \ufffd" in page.text


def test_a_path_ending_in_html(write_run: RunWriter, tmp_path: Path) -> None:
    written = write_report(
        [write_run("sift", num_queries=3)], tmp_path / "deep" / "mine.html", num_resamples=20
    )
    assert [path.name for path in written] == ["mine.html", *(f"mine-{n}" for n in FIGURES)]
    assert all(path.parent == tmp_path / "deep" for path in written)


def test_the_caller_s_matplotlib_is_left_alone(write_run: RunWriter, tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    write_report([write_run("sift", num_queries=3)], tmp_path / "out", num_resamples=20)
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib(write_run: RunWriter, tmp_path: Path) -> None:
    folder = write_run("sift", num_queries=3)
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from ttt_adapt.errors import MissingDependencyError\n"
        "from ttt_adapt.evaluation.report import write_report\n"
        "try: write_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "except MissingDependencyError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "pip install 'ttt-adapt[report]'" in done.stdout
    assert not (tmp_path / "out").exists()


def test_importing_the_report_loads_nothing_heavy() -> None:
    code = (
        "import sys; import ttt_adapt.evaluation.report; "
        "print([m for m in ('torch', 'matplotlib', 'faiss', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (tag("p", "a<b & c", Markup("<b>d</b>"), None, 3), "<p>a&lt;b &amp; c<b>d</b>3</p>"),
        (tag("td", class_='x"y', hidden=True, id=None), '<td class="x&quot;y" hidden></td>'),
        (tag("meta", charset="utf-8"), '<meta charset="utf-8">'),
        (join("<", tag("i", ">"), separator=" "), "&lt; <i>&gt;</i>"),
    ],
)
def test_markup(made: Markup, expected: str) -> None:
    assert made == expected


def test_clean_and_shorten() -> None:
    assert clean("a\x00b\ud800c\n\t") == "a\ufffdb\ufffdc\n\t"
    assert shorten("  a \n b  ", 10) == "a b"
    assert shorten("abcdef", 4) == "abc…"
