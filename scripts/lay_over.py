"""vLLM's Python of one release on the compiled parts of another, which this runs in:

PYTHON scripts/lay_over.py WHEEL ENVIRONMENT

The environment sees all packages of the one that this runs in, and of vLLM the wheel's. vLLM finds
its platform by a version that names it, so this one names the CPU.
"""

import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

UNUSED = re.compile(r"\.(so|h|hpp|cuh|cu|inl)$|^vllm/vllm-rs$")
"""Compiled for another device, and what compilers read."""


def lay_over(wheel: Path, environment: Path) -> None:
    packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    below = Path(sysconfig.get_path("purelib"))
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not UNUSED.search(name)]
        archive.extractall(packages, names)
    for compiled in (below / "vllm").rglob("*.so"):
        link = packages / compiled.relative_to(below)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(compiled)
    (metadata,) = packages.glob("vllm*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(re.sub(r"(?m)^(Version: [\w.]+)$", r"\1+cpu", text, count=1), "utf-8")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")


if __name__ == "__main__":
    assert find_spec("vllm") is not None, "no vLLM to lie upon"
    lay_over(Path(sys.argv[1]), Path(sys.argv[2]))
