"""``kernel checkpoint list``, ``show`` and ``verify``. Looking needs no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from kernel_core.checkpoint.contents import Described, described_tensors, problem_of, read_lock, unfinished_in
from kernel_core.checkpoint.files import LocalFiles, verify
from kernel_core.checkpoint.header import BYTES_OF_DTYPE
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in, locate, read_manifest
from kernel_core.checkpoint.manifest import MANIFEST, readable_size
from kernel_core.errors import CheckpointError, CheckpointMissingError, ConfigError, StorageMissingError
from kernel_core.storage import Storage, join_url, open_storage

from kernel_cli.output import Result, columns
from kernel_cli.runs import RUNS, find_checkpoint, read_as_written, run_called, run_in, runs_in

FOLDER = "checkpoints"  # of a run


# --- list ------------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: str, as_json: bool) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, of a folder of runs, or in a folder; the newest first."""
    if "://" not in folder and not Path(folder).is_dir() and (run := run_called(folder, Path(RUNS))) is not None:
        folder = str(run.folder)
    if "://" not in folder and not Path(folder).is_dir() and folder != RUNS:
        raise ConfigError(
            f"checkpoint list: there is no folder {folder!r}. Expected a run, a folder of runs or of checkpoints."
        )
    rows = [row for place in folders_of(folder) for row in _rows(open_storage(place))]
    rows.sort(key=lambda row: (row["created"] is not None, row["created"] or 0.0), reverse=True)
    if not as_json:
        _print_list(rows, folder)
    return rows


def folders_of(path: str) -> list[str]:
    """Return the folders of checkpoints that ``path`` means: its own, that of the run it is, those of the runs in it."""
    found = [
        path,
        join_url(path, FOLDER),
        *(join_url(path, name, FOLDER) for name in open_storage(path).list_folders()),
    ]
    if "://" not in path:
        runs = [run for run in [run_in(Path(path)), *runs_in(Path(path))] if run is not None]
        found += [run.checkpoints for run in runs if run.checkpoints]
    unique = {place if "://" in place else str(Path(place).resolve()): place for place in found}
    return list(unique.values())


def _rows(storage: Storage) -> Iterator[dict[str, Any]]:
    for one in _all_in(storage):
        problem = problem_of(one)
        yield _row(one, "damaged" if problem else "complete", problem)
    for name in unfinished_in(storage):
        yield _empty_row(join_url(storage.url, name), name, "unfinished", f"it has no {MANIFEST}")


def _all_in(storage: Storage) -> Iterator[Found | Damaged]:
    """Yield the checkpoint that the folder itself is, and those in it."""
    try:
        yield Found(storage, "", read_manifest(storage))
    except StorageMissingError:
        pass
    except CheckpointError as error:
        yield Damaged(storage, "", error)
    yield from checkpoints_in(storage)


def _row(one: Found | Damaged, status: str, problem: str) -> dict[str, Any]:
    url = join_url(one.storage.url, one.name)
    name = one.name or url.rstrip("/").rpartition("/")[2]
    row = _empty_row(url, name, status, problem)
    if isinstance(one, Damaged):
        return row
    manifest = one.manifest
    return row | {
        "run_name": manifest.run_name,
        "epoch": int(manifest.timestamp.epoch),
        "batch": int(manifest.timestamp.batch),
        "bytes": manifest.num_bytes,
        "created": manifest.created,
        "age_s": round(max(0.0, time.time() - manifest.created), 1),
        "world_size": manifest.world_size,
        "weights_only": manifest.weights_only,
        "saver": manifest.saver,
    }


def _empty_row(url: str, name: str, status: str, problem: str) -> dict[str, Any]:
    nothing = ("run_name", "epoch", "batch", "bytes", "created", "age_s", "world_size", "weights_only", "saver")
    return {"path": url, "name": name, **dict.fromkeys(nothing), "status": status, "problem": problem or None}


def _print_list(rows: Sequence[Mapping[str, Any]], folder: str) -> None:
    if not rows:
        click.echo(f"no checkpoints in {folder}")
        return
    lines: list[tuple[str, ...]] = [("name", "run", "epoch", "batch", "size", "age", "ranks", "state", "path")]
    for row in rows:
        known = row["created"] is not None
        numbers = (
            (row["epoch"], row["batch"], readable_size(row["bytes"]), _age(row["age_s"]), row["world_size"])
            if known
            else ["-"] * 5
        )
        state = row["status"] + (", weights only" if row["weights_only"] else "")
        lines.append(
            tuple(clean(str(cell)) for cell in (row["name"], row["run_name"] or "-", *numbers, state, row["path"]))
        )
    click.echo(columns(lines))
    for row in rows:
        if row["problem"] and row["status"] == "damaged":
            click.echo(f"\n{clean(row['path'])}: {clean(row['problem'])}")


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def clean(text: str) -> str:
    """Return ``text`` without what would steer a terminal: it may come from a stranger's file."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


# --- show ------------------------------------------------------------------------------------------------------------


def show_checkpoint(path: str, tensors: bool, as_json: bool) -> dict[str, Any]:
    """Return what a checkpoint says about itself."""
    found = find_checkpoint(path)
    lock, manifest = read_lock(found), found.manifest
    described = described_tensors(found)
    details: dict[str, Any] = {
        "path": found.url,
        "manifest": {
            "version": manifest.version,
            "run_name": manifest.run_name,
            "saver": manifest.saver,
            "sequence": manifest.sequence,
            "timestamp": manifest.timestamp.to_json(),
            "world_size": manifest.world_size,
            "weights_only": manifest.weights_only,
            "created": manifest.created,
            "bytes": manifest.num_bytes,
            "files": {name: record.size for name, record in manifest.files.items()},
        },
        **plain(lock),
        "num_tensors": len(described),
        "num_elements": sum(math.prod(tensor.shape) for tensor in described.values()),
    }
    if tensors:
        details["tensors"] = [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": tensor.num_pieces}
            for name, tensor in described.items()
        ]
    if not as_json:
        with read_as_written(found):
            _print_details(details, described if tensors else {})
    return details


def plain(value: Any) -> Any:
    """Return ``value`` as what JSON holds; a number that is not finite becomes text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _print_details(details: Mapping[str, Any], tensors: Mapping[str, Described]) -> None:
    manifest, model = details["manifest"], details.get("model", {})
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["created"]))
    done = manifest["timestamp"].items()
    counts = [f"{key} {value}" for key, value in done if key in ("epoch", "batch", "sample", "token", "iteration")]
    what = "weights only" if manifest["weights_only"] else "the whole run"
    rows = [
        ("run", f"{manifest['run_name']}, seed {details.get('seed')}"),
        ("saved", f"{when} by {manifest['saver'] or 'the program'}, as number {manifest['sequence']}"),
        ("progress", ", ".join(counts) or "the start"),
        (
            "holds",
            f"{what}: {len(manifest['files'])} files, {readable_size(manifest['bytes'])}, format {manifest['version']}",
        ),
        (
            "model",
            f"{model.get('class')}: {model.get('num_parameters', 0):,} parameters in {model.get('num_tensors')} tensors",
        ),
        ("ranks", manifest["world_size"]),
    ]
    _section(f"checkpoint {details['path']}", rows)
    plan = details.get("plan", {})
    _section("plugins", [_plugin(one) for one in plan.get("plugins", [])])
    events = plan.get("events", {}).items()
    _section("plan", [(event, " → ".join(call["plugin"] for call in calls)) for event, calls in events])
    surgery = details.get("surgery", [])
    _section("surgery", [(one["plugin"], one["path"], one["what"]) for one in surgery])
    for name in ("run", "environment"):
        _section(name, list(details.get(name, {}).items()))
    _section("tensors", [_tensor(name, tensor) for name, tensor in tensors.items()])


def _plugin(one: Mapping[str, Any]) -> tuple[Any, ...]:
    options = ", ".join(f"{key}={value!r}" for key, value in one["options"].items())
    origin = f"{one['distribution'] or 'no distribution'} {one['version'] or ''}".strip()
    return one["id"], one["kind"], origin, str(one["hash"] or "")[:12], options


def _tensor(name: str, tensor: Described) -> tuple[Any, ...]:
    pieces = f"{tensor.num_pieces} pieces" if tensor.num_pieces > 1 else ""
    size = math.prod(tensor.shape) * BYTES_OF_DTYPE[tensor.dtype]
    return name, tensor.dtype, list(tensor.shape), readable_size(size), pieces


def _section(title: str, rows: Sequence[Sequence[Any]]) -> None:
    if rows:
        click.echo(f"{clean(title)}\n" + columns([[clean(str(cell)) for cell in row] for row in rows], "  ") + "\n")


# --- verify ----------------------------------------------------------------------------------------------------------


def verify_checkpoints(paths: Sequence[str], as_json: bool) -> Result:
    """Read every file of the checkpoints and compare it with its manifest; the exit code is 1 if one is damaged."""
    rows = [_verified(one) for path in paths for one in _meant(path)]
    if not as_json:
        for row in rows:
            click.echo(
                f"{clean(row['path'])}: {row['status']}, {row['num_files']} files, {readable_size(row['bytes'])}"
            )
            for problem in row["problems"]:
                click.echo(f"  {clean(problem)}")
    return Result(rows, int(any(row["status"] != "intact" for row in rows)))


def _meant(path: str) -> list[Found | Damaged]:
    """Return the checkpoint that ``path`` is, or all in the run or folder that it is.

    Raises:
        CheckpointMissingError: there is none.
    """
    if path.rstrip("/").endswith("/latest"):
        return [locate(path)]
    run = run_called(path, Path(RUNS))
    found = list(_all_in(open_storage(run.checkpoints if run is not None and run.checkpoints else path)))
    if not found:
        raise CheckpointMissingError(
            f"checkpoint verify: there is no checkpoint in {path}: no {MANIFEST}, neither there nor one folder below. Expected a "
            "checkpoint, a folder of checkpoints, or a run."
        )
    return found


def _verified(one: Found | Damaged) -> dict[str, Any]:
    url = join_url(one.storage.url, one.name)
    if isinstance(one, Damaged):
        return {"path": url, "status": "damaged", "num_files": 0, "bytes": 0, "problems": [str(one.problem)]}
    problems = []
    for name in sorted(one.manifest.files):  # one by one: those of a remote store need little room, and all are told
        files = LocalFiles(one)
        try:
            verify(files, [name])
        except (CheckpointError, StorageMissingError) as error:
            problems.append(str(error))
        finally:
            files.close()
    return {
        "path": url,
        "status": "damaged" if problems else "intact",
        "num_files": len(one.manifest.files),
        "bytes": one.manifest.num_bytes,
        "problems": problems,
    }
