"""Try an installed wheel: every module of the source tree is in it, and the command answers.

python -I smoke.py ROOT      run away from ROOT, the source tree to compare with
"""

import importlib
import subprocess
import sys
from pathlib import Path


def main(root: Path) -> None:
    import ttt_adapt
    from ttt_adapt.config import ExperimentSettings, PretrainSettings, load_settings
    from ttt_adapt.configs import config_names, config_path
    from ttt_adapt.conversion_settings import ConvertSettings
    from ttt_adapt.curriculum import GRPOSettings
    from ttt_adapt.vision.training import VisionTrainSettings

    installed = Path(ttt_adapt.__file__).resolve().parent
    if installed.is_relative_to(root):
        sys.exit(f"expected the wheel's ttt_adapt, found {installed}")

    missing = [name for name in shipped_files(root) if not (installed / name).is_file()]
    if missing:
        sys.exit(f"{len(missing)} files are not in the wheel: {', '.join(missing)}")
    modules = sorted(name for name in shipped_files(root) if name.endswith(".py"))
    for name in modules:
        importlib.import_module(module_name(name))
    for name in config_names():
        if name.startswith(("ablation_", "pretrain_", "ttt_", "transformer_")):
            kind = PretrainSettings
        elif name.startswith("ttc_rl_"):
            kind = GRPOSettings
        elif name.startswith("vision_"):
            kind = VisionTrainSettings
        else:
            kind = ConvertSettings if name.startswith("convert_") else ExperimentSettings
        load_settings(kind, config_path(name))
    for name in ttt_adapt.__all__:
        getattr(ttt_adapt, name)

    command = Path(sys.executable).with_name("ttt-adapt")
    answer = run(command, "--version")
    if answer.split() != ["ttt-adapt", ttt_adapt.__version__]:
        sys.exit(f"ttt-adapt --version: expected {ttt_adapt.__version__}, found {answer!r}")
    run(command, "--help")
    run(command, "doctor", "--json")
    print(f"wheel: {len(modules)} modules, {len(config_names())} recipes, {answer.strip()}")


def shipped_files(root: Path) -> list[str]:
    """Files below ``ttt_adapt`` that a user needs, rooms behind links included, as paths there."""
    names = []
    for room in [root / "ttt_adapt", *(root / "ttt_adapt").iterdir()]:
        if room.is_dir() and room.name != "__pycache__":
            base = room.resolve()
            prefix = Path() if room.name == "ttt_adapt" else Path(room.name)
            pattern = "*" if room.name == "ttt_adapt" else "**/*"
            for path in base.glob(pattern):
                inside = path.relative_to(base)
                wanted = path.suffix in {".py", ".toml"} or path.name == "py.typed"
                if path.is_file() and (wanted or "bundled" in inside.parts):
                    names.append((prefix / inside).as_posix())
    return names


def module_name(path: str) -> str:
    """``models/loading.py`` as ``ttt_adapt.models.loading``."""
    parts = ["ttt_adapt", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run(command: Path, *arguments: str) -> str:
    """Standard output of the installed command, which must succeed."""
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ttt-adapt {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


main(Path(sys.argv[1]).resolve())
