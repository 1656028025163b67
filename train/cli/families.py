"""The configs that come with the program, a family in each file."""

import fnmatch
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "configs"
# A variable and the name of its config: they are the same, but for a family's `config`.
# Between them no other variable, whose line would begin with a letter.
CONFIG = re.compile(r'^(\w+) = [\w.]+\((?:(?!^\w)[^"])*?\bname="(\w+)"', re.MULTILINE)


def shipped_configs() -> dict[str, Path]:
    """Returns the file of each config that comes with the program, by its name.

    The files are read, not run, which takes seconds.
    """
    return dict(
        sorted(
            (name, path)
            for path in FOLDER.glob("*.py")
            for variable, name in CONFIG.findall(path.read_text(encoding="utf-8"))
            if variable in (name, "config")
        )
    )


def config_families() -> dict[str, tuple[str, list[str]]]:
    """Returns the families: by file what its configs train, and their names."""
    families: dict[str, tuple[str, list[str]]] = {}
    for name, path in shipped_configs().items():
        what = path.read_text(encoding="utf-8").partition("\n")[0].strip('"')
        families.setdefault(path.stem, (what, []))[1].append(name)
    first = "quickstart", "own_data"  # Where most begin.
    return dict(sorted(families.items(), key=lambda x: (x[0] not in first, x[0])))


def matching_configs(path: Path) -> list[Path]:
    """Returns the names of shipped configs that a pattern like "digits_*" matches.

    What is no pattern stands for itself.

    Raises:
      FileNotFoundError: if no name matches.
    """
    if "*" not in str(path):
        return [path]
    if not (names := fnmatch.filter(shipped_configs(), str(path))):
        raise FileNotFoundError(f"no config that comes with the program is like {path}")
    return list(map(Path, names))
