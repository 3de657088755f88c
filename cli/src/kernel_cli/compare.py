"""``kernel checkpoint diff`` and ``export``: what needs the values of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from kernel_core.checkpoint.contents import read_lock
from kernel_core.checkpoint.export import Weights, export_file, export_folder
from kernel_core.checkpoint.locate import Found
from kernel_core.checkpoint.reader import StoredTensor
from kernel_core.errors import ConfigError
from kernel_core.registry.lock import differences

from kernel_cli.checkpoint import clean, plain
from kernel_cli.output import columns
from kernel_cli.runs import find_checkpoint, read_as_written

SHOWN = 10  # names of tensors in a list for people
ABSENT = "absent"


def diff_checkpoints(a: str, b: str, as_json: bool) -> dict[str, Any]:
    """Return how two checkpoints differ: plugins, settings, environment, configuration, and the tensors of the model."""
    first, second = find_checkpoint(a), find_checkpoint(b)
    with read_as_written(first, second):
        result = {"a": first.url, "b": second.url, **_told(first, second)}
    with Weights(first) as mine, Weights(second) as others:
        result["tensors"] = compare(mine.tensors, others.tensors)
    if not as_json:
        _print_diff(result)
    return plain(result)  # type: ignore[no-any-return]


def _told(first: Found, second: Found) -> dict[str, Any]:
    """Return how two checkpoints differ in what they say about their runs."""
    a, b = read_lock(first), read_lock(second)
    told: dict[str, Any] = {"plan": [one.text for one in differences(a["plan"], b["plan"], {})]}
    moments = [plain(one.manifest.timestamp.to_json()) for one in (first, second)]
    told["progress"] = _changes(moments[0], moments[1])
    for section in ("run", "environment", "config"):
        told[section] = _changes(plain(a.get(section)), plain(b.get(section)))
    for section, keys in (("run", ("seed", "run_name")), ("model", ("class", "num_parameters"))):
        one, other = (lock["model"] if section == "model" else lock for lock in (a, b))
        told.setdefault(section, {}).update(
            _changes({key: one.get(key) for key in keys}, {key: other.get(key) for key in keys})
        )
    return told


def _changes(a: Any, b: Any, where: str = "") -> dict[str, Any]:
    """Return ``{path: [in a, in b]}`` for what differs in two documents."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: dict[str, Any] = {}
        for key in dict.fromkeys([*a, *b]):
            path = f"{where}.{key}" if where else str(key)
            found |= _changes(a.get(key, ABSENT), b.get(key, ABSENT), path)
        return found
    return {} if a == b and type(a) is type(b) else {where: [a, b]}


def compare(a: Mapping[str, StoredTensor], b: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Compare tensors by name, shape, dtype and value; one pair at a time is in memory.

    Returns:
        ``only_a``, ``only_b``, ``reshaped``, ``equal`` (how many, bit for bit), ``different``, and ``largest``: the largest
        absolute difference of an element, with its tensor.
    """
    both = [name for name in a if name in b]
    reshaped = [name for name in both if a[name].shape != b[name].shape]
    different = {}
    for name in both:
        if name not in reshaped and (difference := _difference(a[name], b[name])) is not None:
            different[name] = difference
    largest = max(different, key=lambda name: _rank(different[name]), default=None)
    return {
        "only_a": [name for name in a if name not in b],
        "only_b": [name for name in b if name not in a],
        "reshaped": [{"name": name, "a": list(a[name].shape), "b": list(b[name].shape)} for name in reshaped],
        "equal": len(both) - len(reshaped) - len(different),
        "different": different,
        "largest": None if largest is None else {"name": largest, "difference": different[largest]},
    }


def _rank(value: float) -> float:
    return float("inf") if value != value else value


def _difference(a: StoredTensor, b: StoredTensor) -> float | None:
    """Return the largest absolute difference of two tensors of one shape, None if they are the same bit for bit."""
    one, other = a.whole(), b.whole()
    if one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)):
        return None
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max()) if one.numel() else 0.0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _print_diff(result: Mapping[str, Any]) -> None:
    click.echo(f"a  {clean(result['a'])}\nb  {clean(result['b'])}\n")
    click.echo(
        "\n".join(["plan", *(f"  {clean(line)}" for line in result["plan"])]) if result["plan"] else "plan: the same"
    )
    for section in ("progress", "run", "environment", "model", "config"):
        changes = result[section]
        rows = [[clean(str(cell)) for cell in (key, was, "→", now)] for key, (was, now) in changes.items()]
        click.echo(f"{section}\n{columns(rows, '  ')}" if rows else f"{section}: the same")
    click.echo("tensors\n" + "\n".join(f"  {clean(line)}" for line in _tensor_lines(result["tensors"])))


def _tensor_lines(tensors: Mapping[str, Any]) -> Iterator[str]:
    yield f"{tensors['equal']} equal, {len(tensors['different'])} different"
    if tensors["largest"] is not None:
        yield f"largest difference: {tensors['largest']['difference']:.4g} in {tensors['largest']['name']}"
    for key, text in (("only_a", "only in a"), ("only_b", "only in b")):
        if names := tensors[key]:
            yield f"{text}: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
    for one in tensors["reshaped"][:SHOWN]:
        yield f"reshaped: {one['name']} {one['a']} → {one['b']}"


def export_checkpoint(path: str, out: str, form: str, dtype: str | None, as_json: bool) -> dict[str, Any]:
    """Write the weights of a checkpoint as one safetensors file, or as a folder of another library."""
    target = Path(out)
    if "://" in out:
        raise ConfigError(
            f"checkpoint export: got {out!r}. Expected a path of this machine. Copy the result from there."
        )
    if target.is_file() or (target.is_dir() and (form == "safetensors" or any(target.iterdir()))):
        raise ConfigError(
            f"checkpoint export: {out} is there already. Expected a new name. Choose another, or remove it."
        )
    found = find_checkpoint(path)
    lock = read_lock(found)
    with Weights(found) as weights:
        if form == "safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            done = export_file(weights, target, dtype)
        else:
            done = export_folder(weights, lock, target, form, dtype)
    surgery = [change for change in lock.get("surgery", []) if form != "safetensors"]
    if surgery:
        names = ", ".join(dict.fromkeys(str(change["plugin"]) for change in surgery))
        click.echo(
            f"checkpoint export: the model was changed by {clean(names)}, which {form} knows nothing of: what it loads may "
            "compute something else.",
            err=True,
        )
    if not as_json:
        click.echo(f"{done.path}: {done.num_tensors} tensors, {done.num_bytes:,} bytes, of {clean(found.url)}")
    return {
        "path": str(done.path),
        "checkpoint": found.url,
        "format": form,
        "num_tensors": done.num_tensors,
        "bytes": done.num_bytes,
    }
