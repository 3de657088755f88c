"""``kernel plugins new``: a complete package for a plugin, of every kind, that passes its own tests at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import click
from kernel_core.errors import ConfigError
from kernel_core.naming import did_you_mean, normalize
from kernel_core.registry.discovery import HOOK_KINDS, KINDS, installed_plugins

TEMPLATES = files("kernel_cli") / "templates"
TRAIN = "kernel train --plugins"
FUNCTIONS = ("models", "data")  # kinds whose entry point is a function of the plugin's name
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


def new_plugin(name: str, kind: str, out: str | None, distribution: str | None, as_json: bool) -> dict[str, Any]:
    """Write a package and return its files.

    Raises:
        ConfigError: the name or the kind is none, or the folder is there.
    """
    chosen, plugin = read_kind(kind), read_name(name)
    distribution = distribution or f"kernel-plugin-{plugin.replace('_', '-')}"
    folder = Path(out) if out is not None else Path(distribution)
    if folder.exists():
        raise ConfigError(
            f"plugins new: {folder} is there already. Expected a new folder. Remove it, or give --out FOLDER."
        )
    if any(info.name == plugin and info.kind == chosen for info in installed_plugins()):
        click.echo(
            f"plugins new: a plugin {plugin!r} of that kind is installed; both at once have to be told apart.", err=True
        )
    contents = render(plugin, chosen, distribution)
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if not as_json:
        click.echo(f"{folder}: a package with a plugin of kind {chosen} that works. Next:\n")
        check = [f"kernel plugins check {plugin} --write"] if chosen in HOOK_KINDS else []
        for command in [f"pip install -e {shlex.quote(str(folder))}", f"pytest {shlex.quote(str(folder))}", *check]:
            click.echo(f"    {command}")
    return {
        "folder": str(folder),
        "name": plugin,
        "kind": chosen,
        "distribution": distribution,
        "files": sorted(contents),
    }


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
    return name


def render(name: str, kind: str, distribution: str) -> dict[str, str]:
    """Return the files of a package by their paths."""
    about, package = ABOUT[kind], f"kernel_plugin_{name}"
    camel = "".join(part.capitalize() for part in name.split("_"))
    words = {
        "name": name,
        "dashed": name.replace("_", "-"),  # a scheme of URLs has no underscore
        "kind": kind,
        "package": package,
        "distribution": distribution,
        "Class": camel,
        "entry": "recipe" if kind == "recipes" else name if kind in FUNCTIONS else camel,
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
    return texts


def _fill(template: str, words: Mapping[str, str]) -> str:
    return Template((TEMPLATES / f"{template}.in").read_text()).substitute(words)
