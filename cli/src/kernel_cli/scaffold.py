"""``kernel plugins new``: a complete package for a plugin, of every kind, that passes its own tests at once."""

from __future__ import annotations

import ast
import json
import keyword
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import click
from kernel_core.errors import ConfigError
from kernel_core.naming import did_you_mean, normalize
from kernel_core.registry.discovery import HOOK_KINDS, KINDS, installed_plugins
from packaging.utils import InvalidName, canonicalize_name

TEMPLATES = files("kernel_cli") / "templates"
TRAIN = "kernel train --plugins"
FUNCTIONS = ("models", "data")  # kinds whose entry point is a function of the plugin's name
LONGEST = 30  # letters of a name with which no line of a template is longer than the formatter allows
CONFORMANCE = ("`kernel plugins check` prints what the conformance kit finds; with `--write` the card is kept in the "
               "package and shown by `kernel plugins show`.")  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What differs from kind to kind in what is written about a plugin.

    Attributes:
        summary: What the plugin of the template does.
        use: The line that uses it, with ``{name}``.
        about: A paragraph, or a table of options.
    """

    summary: str
    use: str
    about: str


ABOUT = {
    "algorithms": Kind(
        "Multiply all gradients by a number.",
        f"{TRAIN} {{name}} -o {{name}}.factor=0.5",
        "| option | default | meaning |\n|-|-|-|\n| `factor` | 0.5 | what gradients are multiplied by, greater than 0 |",
    ),
    "callbacks": Kind(
        "Log the norm of all weights at the end of every epoch.",
        f"{TRAIN} {{name}}",
        "It has no options, and logs `weights/norm`.",
    ),
    "loggers": Kind(
        "Write metrics as plain lines of text.",
        f"{TRAIN} {{name}}",
        "| option | default | meaning |\n|-|-|-|\n| `path` | `{name}.txt` | the file; a run adds to what is there |",
    ),
    "parallelism": Kind(
        "Keep convolutions in the channels-last layout.",
        "kernel train --parallelism {name}",
        "A transform: it changes how the model computes, and not what. It has no options.",
    ),
    "storage": Kind(
        "Keep files where a URL of an own scheme says.",
        "kernel train --set checkpoint.save_folder={dashed}:///tmp/checkpoints",
        "It keeps the contract of `kernel_core.storage.Storage`, which its tests prove.",
    ),
    "models": Kind(
        "A classifier with one hidden layer.",
        "kernel train config.yaml --model {name}",
        "| option | default | meaning |\n|-|-|-|\n| `num_features` | 2 | numbers in a row of its input |\n"
        "| `hidden` | 32 | width of the hidden layer |\n| `num_classes` | 2 | classes it tells apart |",
    ),
    "data": Kind(
        "Points around two centres, and around which each lies.",
        "kernel train config.yaml --set data.name={name}",
        "| option | default | meaning |\n|-|-|-|\n| `batch_size` | 16 | rows in a batch of one rank |\n"
        "| `num_samples` | 256 | points to train on |",
    ),
    "launchers": Kind(
        "Start a training script in one process.",
        "kernel launch --launcher {name} train.py",
        "It passes the exit code of the process on.",
    ),
    "recipes": Kind(
        "Tell two clouds of points apart.",
        "kernel train {name}",
        "A model, its data and settings that belong together.",
    ),
}


def new_plugin(
    name: str, kind: str, out: str | None, distribution: str | None, author: str | None, as_json: bool
) -> dict[str, Any]:
    """Write a package, all of it or nothing, and return its files.

    Raises:
        ConfigError: the name, the kind, the distribution or the author is none, or the folder is there or cannot be made.
    """
    chosen, plugin = read_kind(kind), read_name(name)
    distribution = read_distribution(distribution or f"kernel-plugin-{plugin.replace('_', '-')}")
    contents = render(plugin, chosen, distribution, read_author(author))
    check_hides_nothing(plugin, chosen)
    folder = Path(out) if out is not None else Path(distribution)
    if folder.exists():
        raise ConfigError(
            f"plugins new: {folder} is there already. Expected a new folder. Remove it, or give --out FOLDER."
        )
    if any(info.name == plugin and info.kind == chosen for info in installed_plugins()):
        click.echo(
            f"plugins new: a plugin {plugin!r} of that kind is installed; both at once have to be told apart.", err=True
        )
    try:
        _write(folder, contents)
    except OSError as error:
        raise ConfigError(
            f"plugins new: {folder} cannot be written: {error}. Expected a folder to make. Give --out FOLDER."
        ) from error
    if not as_json:
        click.echo(f"{folder}: a package with a plugin of kind {chosen} that works. Next:\n")
        for command in next_commands(folder, plugin, chosen):
            click.echo(f"    {command}")
    return {
        "folder": str(folder),
        "name": plugin,
        "kind": chosen,
        "distribution": distribution,
        "files": sorted(contents),
    }


def next_commands(folder: Path, name: str, kind: str) -> list[str]:
    """Return what to type next: install it, test it, and prove it or use it."""
    where, use = shlex.quote(str(folder)), ABOUT[kind].use.format(name=name, dashed=name.replace("_", "-"))
    return [
        f"pip install -e {where}",
        f"pytest {where}",
        f"kernel plugins check {name} --write" if kind in HOOK_KINDS else use,
    ]


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    """Write files beside ``folder`` and give them its name when all are there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True) as half:
        whole = Path(half) / "package"  # not the temporary folder itself, which only its owner may read
        for path, text in contents.items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_text(text, encoding="utf-8")
        whole.rename(folder)


def read_kind(text: str) -> str:
    """Return the kind, in the word of its entry-point group, given in the singular or the plural.

    Raises:
        ConfigError: there is no such kind.
    """
    word = normalize(text)
    for kind in KINDS:
        if word in (kind, kind.removesuffix("s")):
            return kind
    known = [kind.removesuffix("s") for kind in KINDS]
    raise ConfigError(f"--kind: got {text!r}.{did_you_mean(word, known)} Expected one of {', '.join(known)}.")


def read_name(text: str) -> str:
    """Return the name of a plugin in its normal form.

    Raises:
        ConfigError: it cannot be one.
    """
    name = normalize(text)
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ConfigError(
            f"plugins new: got the name {text!r}. Expected letters, digits and '_', beginning with a letter, such as my_idea."
        )
    if len(name) > LONGEST:
        raise ConfigError(
            f"plugins new: got the name {name!r} of {len(name)} characters. Expected at most {LONGEST}. Choose a shorter one."
        )
    return name


def read_distribution(text: str) -> str:
    """Return what pip calls the package.

    Raises:
        ConfigError: it cannot be called so.
    """
    try:
        canonicalize_name(text, validate=True)
    except InvalidName:
        raise ConfigError(
            f"--distribution: got {text!r}. Expected letters, digits, '-', '_' and '.', such as kernel-plugin-my-idea."
        ) from None
    return text


def read_author(text: str | None) -> Mapping[str, str]:
    """Return ``name`` and ``email`` of ``Name <email>``; each may be missing.

    Raises:
        ConfigError: it is neither.
    """
    found = re.fullmatch(r"\s*([^<>]*?)\s*(?:<([^<>@\s]+@[^<>@\s]+)>\s*)?", text or "")
    if found is None or not (text or "").isprintable() or (text is not None and not any(found.groups())):
        raise ConfigError(f"--author: got {text!r}. Expected 'Name' or 'Name <name@example.org>'.")
    return {key: value for key, value in zip(("name", "email"), found.groups(), strict=True) if value}


def check_hides_nothing(name: str, kind: str) -> None:
    """Refuse a name under which the class or function of the template would hide what the template uses.

    Raises:
        ConfigError: it would, or it is a word of the language, or pytest would take it for a test.
    """
    if kind == "recipes":
        return  # there it is always `recipe`
    mine, texts = words_of(name, kind)["entry"], render("placeholder", kind, "placeholder")
    used = _names_in(text for path, text in texts.items() if path.endswith(".py"))
    if keyword.iskeyword(mine) or mine in used or mine.lower().startswith("test"):
        raise ConfigError(
            f"plugins new: with the name {name!r} the plugin would be {mine} in Python, which means something else there: "
            "to the language, to the package or to pytest. Choose another name."
        )


def _names_in(sources: Iterable[str]) -> set[str]:
    """Return every name that Python sources define, import or use."""
    found: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


def words_of(name: str, kind: str) -> dict[str, str]:
    """Return what a plugin is called: as a class, as a scheme of URLs, and as what its entry point names."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    return {
        "name": name,
        "dashed": name.replace("_", "-"),  # a scheme of URLs has no underscore
        "kind": kind,
        "package": f"kernel_plugin_{name}",
        "Class": camel,
        "entry": "recipe" if kind == "recipes" else name if kind in FUNCTIONS else camel,
    }


def render(name: str, kind: str, distribution: str, author: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the files of a package by their paths."""
    about, package = ABOUT[kind], f"kernel_plugin_{name}"
    fields = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in (author or {}).items())
    words = {
        **words_of(name, kind),
        "both": ", ".join(sorted((words_of(name, kind)["entry"], "two_clouds"))),  # as imports are sorted
        "distribution": distribution,
        "authors": f"\nauthors = [{{ {fields} }}]" if fields else "",
        "summary": about.summary,
        "use": about.use.format(name=name, dashed=name.replace("_", "-")),
        "about": about.about.format(name=name),
        "needs": "kernel-train",
        "kernel_version": "0.1",
        "check": f". {CONFORMANCE}" if kind in HOOK_KINDS else ".",
    }
    texts = {
        "pyproject.toml": _fill("shared/pyproject.toml", words),
        "README.md": _fill("shared/README.md", words),
        ".gitignore": _fill("shared/gitignore", words),
        ".github/workflows/release.yml": _fill("shared/release.yml", words),
        f"src/{package}/__init__.py": _fill(f"kinds/{kind}.py", words),
        f"src/{package}/py.typed": "",
        f"tests/test_{name}.py": _fill(f"kinds/{kind}_test.py", words),
    }
    if kind in HOOK_KINDS:
        texts[f"tests/test_{name}_conformance.py"] = _fill("shared/conformance.py", words)
        texts[f"src/{package}/conformance.json"] = _fill(f"kinds/{kind}_card.json", words)
    return texts


def _fill(template: str, words: Mapping[str, str]) -> str:
    return Template((TEMPLATES / f"{template}.in").read_text(encoding="utf-8")).substitute(words)
