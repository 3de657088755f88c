"""Make ``.venv`` hold every package of the workspace, editable, and the tools to test it.

Standard library only: this is the first thing that runs on a bare machine. Does nothing when nothing has changed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "workspace.sha256"
TORCHVISION = ROOT / "tools" / "torchvision_on_cpu.py"


def packages() -> list[Path]:
    """Every distribution of the workspace: a folder with a pyproject.toml at one of these places."""
    found = [ROOT, ROOT / "core", ROOT / "cli", *sorted((ROOT / "plugins").glob("*/*"))]
    return [folder for folder in found if (folder / "pyproject.toml").exists()]


def requirements(folders: list[Path]) -> list[str]:
    """What the packages and the tests need from outside."""
    import tomllib  # not there before Python 3.11, and main says so better than an ImportError

    projects = [tomllib.loads((folder / "pyproject.toml").read_text()) for folder in folders]
    own = {project["project"]["name"] for project in projects}
    parts = [
        part
        for project in (project["project"] for project in projects)
        for part in (project.get("dependencies", []), *project.get("optional-dependencies", {}).values())
    ]
    wanted = {
        requirement
        for part in parts
        for requirement in part
        if requirement.split(">")[0].split("=")[0].strip() not in own
    }
    return sorted(wanted | set(projects[0]["dependency-groups"]["dev"]))


def main() -> None:
    folders = packages()
    content = b"".join((folder / "pyproject.toml").read_bytes() for folder in folders)
    others = [ROOT / "constraints.txt", Path(__file__), TORCHVISION]
    content += b"".join(path.read_bytes() for path in others) + "\n".join(map(str, folders)).encode()
    digest = hashlib.sha256(content + sys.version.encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == digest:
        return
    print(f"Setting up {VENV.name} for {len(folders)} packages; this takes a few minutes the first time.", flush=True)
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    python = str(VENV / "bin" / "python")
    quiet = ["-q", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    # torch first and by itself: a constraint decides its build before anything else asks for it
    for wanted in (["torch", "numpy", "uv"], requirements(folders)):
        subprocess.run([python, "-m", "pip", "install", *quiet, *constraints, *wanted], check=True)
    editable = [part for folder in folders for part in ("-e", str(folder))]
    environment = {**os.environ, "VIRTUAL_ENV": str(VENV)}
    command = [python, "-m", "uv", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--offline", *editable]
    subprocess.run(command, check=True, env=environment)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output(where, text=True).strip())
    shutil.copy(TORCHVISION, site)
    (site / f"{TORCHVISION.stem}.pth").write_text(f"import {TORCHVISION.stem}\n")
    STAMP.write_text(digest)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 (this file also runs on the Python that is too old)
        sys.exit(f"python3 is {sys.version.split()[0]}; Python 3.11 or newer is needed.")
    main()
