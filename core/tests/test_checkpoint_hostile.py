"""A checkpoint made by somebody who means harm is refused with a message, and nothing of what is in it is ever executed."""

import contextlib
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Trainer
from kernel_core.checkpoint.codec import write_json
from kernel_core.checkpoint.manifest import checksum
from kernel_core.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointMismatchError
from kernel_core.models import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MARK = "KERNEL_CORE_HOSTILE_MARK"  # set in the environment if a planted pickle is ever run
WEIGHTS, STATE = "model-00000.safetensors", "state-00000.safetensors"
FILES = ["lock.json", "state.json", "rank-00000.json", WEIGHTS, STATE]


def make(**more: Any) -> Trainer:
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.ReLU(), nn.Linear(6, 3)), num_classes=3)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, 4, shuffle=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="2ep",
        seed=5,
        device="cpu",
        progress_bar=False,
        **more,
    )


@pytest.fixture(scope="module")
def honest(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    with make(save_folder=str(folder), save_filename="good", save_interval="2ba") as trainer:
        trainer.fit(duration="2ba")
    assert sorted(os.listdir(folder / "good")) == sorted([*FILES, "manifest.json"])
    return Path(folder) / "good"


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Iterator[Path]:
    os.environ.pop(MARK, None)
    yield Path(shutil.copytree(honest, tmp_path / "copy"))
    assert MARK not in os.environ


def sign(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Write a manifest with the right sizes and checksums of the files as they are now; anybody can do that."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    for name, record in body["files"].items():
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            record.update(size=len(data), checksum=checksum([data]))
    if change is not None:
        change(body)
    body.pop("checksum", None)
    path.write_bytes(write_json({**body, "checksum": checksum([write_json(body)])}))


def refused(folder: Path, kind: type[Exception], problem: str, **more: Any) -> None:
    """Assert that the trainer refuses the checkpoint, with a message of one paragraph."""
    with pytest.raises(kind, match=problem) as told:
        make(load_path=str(folder), **more)
    assert isinstance(told.value, CheckpointError)
    assert len(str(told.value)) < 1500


class Planted:
    def __reduce__(self) -> Any:
        return (exec, (f"import os; os.environ[{MARK!r}] = 'run'",))


PICKLES = {
    "protocol 0": pickle.dumps(Planted(), 0),
    "protocol 5": pickle.dumps(Planted(), 5),
}


def torch_pickle(path: Path) -> None:
    torch.save({"state": Planted()}, path)


def test_the_honest_one_loads(copy: Path) -> None:
    sign(copy)
    with make(load_path=str(copy)) as trainer:
        assert trainer.state.timestamp.batch == 2
        trainer.fit()


# --- pickles in every place -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["protocol 0", "protocol 5", "torch"])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("signed", [False, True])
def test_a_pickle_in_the_place_of_a_file_is_refused(copy: Path, name: str, how: str, signed: bool) -> None:
    path = copy / name
    if how == "torch":
        torch_pickle(path)
    else:
        path.write_bytes(PICKLES[how])
    if name == "manifest.json":
        refused(copy, CheckpointFormatError, r"manifest.json: is not JSON as a checkpoint holds it")
    elif not signed:
        refused(
            copy, CheckpointCorruptError, rf"{name} has \d+ bytes, and \d+ were written\. The checkpoint is damaged"
        )
    else:
        sign(copy)
        problem = "is not JSON|announces a header" if name.endswith("safetensors") else "is not JSON"
        refused(copy, CheckpointFormatError, rf"{name}: ({problem})")


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_behind_a_file_is_refused(copy: Path, name: str) -> None:
    with (copy / name).open("ab") as file:
        file.write(PICKLES["protocol 5"])
    sign(copy)
    refused(copy, CheckpointFormatError, rf"{name}: (is not JSON|its tensors end at byte)")


def test_a_pickle_as_a_tensor_is_numbers(copy: Path) -> None:
    """Bytes of a pickle as the state of a generator: they are the bytes of a tensor and nothing else."""
    header, data = split(copy / STATE)
    entry = header["rank/rng/torch"]
    data[slice(*entry["data_offsets"])] = PICKLES["protocol 5"].ljust(
        entry["data_offsets"][1] - entry["data_offsets"][0]
    )
    join(copy / STATE, header, data)
    sign(copy)
    with contextlib.suppress(CheckpointError, RuntimeError):  # torch may refuse such a state
        make(load_path=str(copy)).close()


@pytest.mark.parametrize("extra", ["model.pkl", "data.pt", "__init__.py", ".metadata", "rank-00000.json.pkl"])
def test_files_that_the_manifest_does_not_name_are_not_touched(copy: Path, extra: str) -> None:
    (copy / extra).write_bytes(PICKLES["protocol 0"])
    make(load_path=str(copy)).close()


# --- manifest ---------------------------------------------------------------------------------------------------------


def rename(new: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["files"][new] = body["files"].pop("lock.json")

    return change


NAMES = [
    "../evil.json",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/lock.json",
    "./lock.json",
    "lock.json/",
    "lock.json\n",
    "..\\lock.json",
    "lock.json\x00",
    "LOCK.JSON",
    "lock.py",
    "rank-0.json",
    "rank-٠٠٠٠٠.json",
    "rank-00000.json.pkl",
    "model-00000.bin",
    "manifest.json",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_of_files_that_are_no_checkpoints_are_refused(copy: Path, name: str) -> None:
    sign(copy, rename(name))
    refused(
        copy,
        CheckpointFormatError,
        rf"manifest.json: is not a manifest .*{re.escape(repr(repr(name)[1:-1])[1:-1])[:20]}",
    )


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (lambda body: body.update(version=2), "is of version 2 of the format, and this kernel reads up to 1. Upgrade"),
    "version of text": (lambda body: body.update(version="1"), "the number '1'"),
    "version 0": (lambda body: body.update(version=0), "the number 0"),
    "another format": (lambda body: body.update(format="pickle"), "is no manifest of a checkpoint"),
    "no files": (lambda body: body.pop("files"), "'files'"),
    "files as list": (lambda body: body.update(files=[]), "no attribute"),
    "size of text": (lambda body: body["files"]["lock.json"].update(size="1"), "the number '1'"),
    "negative size": (lambda body: body["files"]["lock.json"].update(size=-1), "the number -1"),
    "huge size": (lambda body: body["files"]["lock.json"].update(size=2**63), "the number 9223372036854775808"),
    "broken size": (lambda body: body["files"]["lock.json"].update(size=1.5), "the number 1.5"),
    "no checksum": (lambda body: body["files"]["lock.json"].pop("checksum"), "'checksum'"),
    "record as list": (lambda body: body["files"].update({"lock.json": [1, "x"]}), "list indices"),
    "world size 0": (lambda body: body.update(world_size=0), "the number 0"),
    "world size true": (lambda body: body.update(world_size=True), "the number True"),
    "world size 2**40": (lambda body: body.update(world_size=2**40), "not those of a checkpoint of 1099511627776 ranks"),
    "two ranks": (lambda body: body.update(world_size=2), "its files are not those of a checkpoint of 2 ranks"),
    "no state": (lambda body: body["files"].pop("state.json"), "its files are not those"),
    "no lock": (lambda body: body["files"].pop("lock.json"), "its files are not those"),
    "timestamp": (lambda body: body.update(timestamp={"batch": -1}), "timestamp: batch is -1"),
    "unknown count": (lambda body: body.update(timestamp={"years": 1}), "years"),
    "run name": (lambda body: body.update(run_name=[1]), "the text"),
    "sequence": (lambda body: body.update(sequence=1.5), "the number 1.5"),
    "created": (lambda body: body.update(created="now"), "created 'now'"),
    "created huge": (lambda body: body.update(created=10**400), "OverflowError"),
    "weights only": (lambda body: body.update(weights_only=1), "weights_only"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_are_none_are_refused(copy: Path, name: str) -> None:
    change, problem = MANIFESTS[name]
    sign(copy, change)
    refused(copy, CheckpointFormatError, re.escape(problem))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is not JSON"),
        (b"[]", "is no manifest"),
        (b'{"format":"kernel-checkpoint"}', "its checksum does not fit"),
        (b'{"format":"kernel-checkpoint","version":1,"created":NaN}', "the number NaN"),
        (b'{"format":"kernel-checkpoint","version":1,"created":1e999}', "the number 1e999"),
        (b'{"format":"kernel-checkpoint","format":"kernel-checkpoint"}', "comes twice"),
        (b'{"format":"kernel-checkpoint","a":' + b"[" * 50_000, "is not JSON"),
        (
            b'{"format":"kernel-checkpoint","a":' + b"[" * 900 + b"]" * 900 + b"}",
            "does not fit its content|is not JSON",
        ),
        (b'{"format":"kernel-checkpoint","version":' + b"9" * 4000 + b"}", "is of version 9+"),
        (b'{"format":"kernel-checkpoint","version":' + b"9" * 5000 + b"}", "is not JSON"),
    ],
    ids=range(10),
)
def test_text_that_is_no_manifest_is_refused(copy: Path, data: bytes, problem: str) -> None:
    (copy / "manifest.json").write_bytes(data)
    refused(copy, (CheckpointFormatError, CheckpointCorruptError), problem)  # type: ignore[arg-type]


def test_a_manifest_written_in_another_way_is_refused(copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b",", b", ", 1))
    refused(copy, CheckpointCorruptError, "its checksum does not fit its content")


def test_a_large_manifest_is_not_read_into_memory(copy: Path) -> None:
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    refused(copy, CheckpointFormatError, "is not JSON")


@pytest.mark.parametrize("name", ["../good", "/", "..", "", "a/b", "..\\x", 5, None, ["x"]])
def test_a_pointer_that_leads_elsewhere_is_not_followed(copy: Path, name: Any) -> None:
    (copy.parent / "latest").write_text(json.dumps({"checkpoint": name, "sequence": 10**9, "batch": 0}))
    with make(load_path=str(copy.parent / "latest")) as trainer:  # what the folder holds counts
        assert trainer.state.timestamp.batch == 2


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_links_are_refused(copy: Path, name: str, where: str) -> None:
    target = (copy if where == "inside" else copy.parent) / "target"
    (copy / name).rename(target)
    (copy / name).symlink_to(target)
    refused(copy, CheckpointCorruptError, rf"{name} is not a file")


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_manifest_that_is_a_link_is_refused(copy: Path, where: str) -> None:
    target = (copy if where == "inside" else copy.parent) / "target"
    (copy / "manifest.json").rename(target)
    (copy / "manifest.json").symlink_to(target)
    refused(
        copy, CheckpointFormatError, r"manifest.json: is (a link, a folder or a pipe|not a file: .*a link leads out of)"
    )


def test_a_manifest_that_is_a_pipe_is_refused(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    refused(copy, CheckpointFormatError, r"manifest.json: is a link, a folder or a pipe. Expected a file")


def test_a_link_to_a_device_is_refused(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    (copy / WEIGHTS).symlink_to("/dev/zero")
    refused(copy, CheckpointCorruptError, rf"{WEIGHTS} is not a file")


def test_a_pipe_is_refused(copy: Path) -> None:
    (copy / "lock.json").unlink()
    os.mkfifo(copy / "lock.json")
    refused(copy, CheckpointCorruptError, r"lock.json is not a file")


# --- documents --------------------------------------------------------------------------------------------------------


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    document = json.loads((folder / name).read_text())
    changed = change(document)
    (folder / name).write_bytes(write_json(document if changed is None else changed))
    sign(folder)


def put(*path: Any) -> Callable[[Any], None]:
    """Return a change that puts the last of ``path`` under the keys before it."""
    *keys, last, value = path

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return change


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


DOCUMENTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "state: a list": ("state.json", lambda _: [1], "state.json: is no object"),
    "state: unknown tag": ("state.json", put("loop", {"$object": "os.system"}), r"the tag '\$object', which does not belong"),
    "state: pickle tag": ("state.json", put("scaler", {"$pickle": "gASV"}), r"the tag '\$pickle', which does not belong"),
    "state: module": ("state.json", put("loop", {"$dtype": "_dynamo"}), "no dtype '_dynamo'"),
    "state: device": ("state.json", put("loop", {"$device": "evil"}), "does not fit its tag"),
    "state: deep": ("state.json", put("loop", nested(700)), "nested too deeply"),
    "state: too deep": ("state.json", put("loop", nested(300)), "nested too deeply|does not fit"),
    "state: optimizers": ("state.json", put("optimizers", 5), "optimizers is a int. Expected a list"),
    "state: optimizer": ("state.json", put("optimizers", [5]), "holds an optimizer without a state by name"),
    "state: optimizer's state": ("state.json", put("optimizers", 0, "state", [1]), "holds an optimizer without a state by name"),
    "state: missing tensor": ("state.json", put("loop", {"$tensor": "gone"}), "has no tensor 'gone'"),
    "state: another rank's": ("state.json", put("loop", {"$tensor": "rank/rng/torch"}), "has no tensor 'rank/rng/torch'"),
    "state: plugins": ("state.json", put("plugins", [1]), "plugins is a list. Expected a dict"),
    "state: rank in loop": ("state.json", put("loop", {"$rank": ["x", "first"]}), r"the tag '\$rank', which does not belong"),
    "state: loop": ("state.json", put("loop", [1]), "loop is a list. Expected a dict"),
    "state: values": ("state.json", put("values", {"$set": []}), "values is a set. Expected a dict"),
    "state: timestamp": ("state.json", put("timestamp", 5), "timestamp is a int. Expected a Timestamp"),
    "rank: a number": ("rank-00000.json", lambda _: 5, "rank-00000.json: is no object"),
    "rank: parts": ("rank-00000.json", put("parts", [1]), "parts is a list. Expected a dict"),
    "rank: state": ("rank-00000.json", put("state", "x"), "state is a str. Expected a dict"),
    "rank: part leads out": (
        "rank-00000.json",
        put("parts", {WEIGHTS: {"module.0.weight": [[6, 4], [1, 0]]}}),
        "a piece of 'module.0.weight' leads out of its shape",
    ),
    "rank: part too large": (
        "rank-00000.json",
        put("parts", {WEIGHTS: {"module.0.weight": [[10**9, 10**9], [0, 0]]}}),
        "the pieces of 'module.0.weight' overlap, or some are missing",
    ),
    "rank: alias": ("rank-00000.json", put("aliases", {"x": "y"}), "'x' stands for 'y', which cannot be"),
    "rank: extra": ("rank-00000.json", put("extra", [1]), "extra is a list. Expected a dict"),
    "rank: extra tensor": ("rank-00000.json", put("extra", {"a": {"$tensor": "b"}}), "has a tensor 'b' where none belongs"),
    "lock: a list": ("lock.json", lambda _: [1], "lock.json: is no object"),
    "lock: no plan": ("lock.json", lambda d: d.pop("plan") and None, "its plan is not one"),
    "lock: plan": ("lock.json", put("plan", 5), "plan is a int. Expected a dict"),
    "lock: plugins": ("lock.json", put("plan", "plugins", 5), "its plan is not one"),
    "lock: plugin": ("lock.json", put("plan", "plugins", [5]), "its plan is not one"),
    "lock: options": ("lock.json", put("plan", "plugins", 0, "options", 5), "its plan is not one"),
    "lock: events": ("lock.json", put("plan", "events", {"batch_end": 5}), "its plan is not one"),
    "lock: event": ("lock.json", put("plan", "events", {"batch_end": [5]}), "its plan is not one"),
    "lock: seed": ("lock.json", put("seed", "5"), "its seed is '5'"),
    "lock: run": ("lock.json", put("run", [1]), "run is a list. Expected a dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_with_other_content_are_refused(copy: Path, name: str) -> None:
    file, change, problem = DOCUMENTS[name]
    edit(copy, file, change)
    refused(copy, CheckpointError, problem)


@pytest.mark.parametrize("file", ["lock.json", "state.json", "rank-00000.json"])
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{" * 100_000, "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
        (b'{"seed":1,"seed":2}', "comes twice"),
        (b'{"seed":NaN}', "the number NaN"),
        (b'{"seed":-1e999}', "the number -1e999"),
        (b'{"seed":' + b"1" * 10_000 + b"}", "is not JSON"),
        ('{"é":1}'.encode(), "is not JSON"),
    ],
    ids=range(7),
)
def test_text_that_is_not_strict_json_is_refused(copy: Path, file: str, data: bytes, problem: str) -> None:
    (copy / file).write_bytes(data)
    sign(copy)
    refused(copy, CheckpointFormatError, rf"{file}: .*{problem}")


# --- tensors ----------------------------------------------------------------------------------------------------------


def split(path: Path) -> tuple[dict[str, Any], bytearray]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])


def join(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))


TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "negative shape": (put("module.0.bias", "shape", [-6]), "a number that is no size"),
    "nan shape": (put("module.0.bias", "shape", [float("nan")]), "the number NaN"),
    "inf shape": (put("module.0.bias", "shape", [float("inf")]), "the number Infinity"),
    "huge shape": (put("module.0.bias", "shape", [2**61]), "a number that is no size"),
    "large shape": (put("module.0.bias", "shape", [10**9]), "bytes for a shape of"),
    "beyond the file": (put("module.0.bias", "data_offsets", [10**6, 10**6 + 24]), "overlap or leave gaps"),
    "negative offset": (put("module.0.bias", "data_offsets", [-24, 0]), "a number that is no size"),
    "code as dtype": (put("module.0.bias", "dtype", "__import__('os')"), "the dtype"),
    "another tensor's bytes": (lambda header: put("module.0.bias", header["module.3.bias"])(header), "overlap or leave gaps"),
    "metadata": (put("__metadata__", {"format": {"a": 1}}), "__metadata__ of its header is not text"),
    "other names": (lambda header: {f"x.{name}": header[name] for name in header if name[0] != "_"}, "no tensor of the model"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_headers_of_tensors_that_lie_are_refused(copy: Path, name: str) -> None:
    change, problem = TENSORS[name]
    header, data = split(copy / WEIGHTS)
    changed = change(header)
    join(copy / WEIGHTS, header if changed is None else changed, data)
    sign(copy)
    refused(copy, CheckpointError, problem)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8, 10**6])
def test_a_giant_header_is_refused(copy: Path, length: int) -> None:
    header, data = split(copy / WEIGHTS)
    join(copy / WEIGHTS, header, data, length)
    sign(copy)
    refused(copy, CheckpointFormatError, rf"{WEIGHTS}: announces a header of {length} bytes in a file of \d+")


# --- plugins ----------------------------------------------------------------------------------------------------------


def plugin(**changes: Any) -> Callable[[Any], None]:
    saved = {
        "id": "evil",
        "name": "evil",
        "kind": "algorithms",
        "distribution": "evil-package",
        "version": "1",
        "hash": "0",
        "options": {},
        "structural": True,
        "affects_training": True,
        **changes,
    }

    def change(lock: Any) -> None:
        lock["plan"]["plugins"].append(saved)

    return change


PLUGINS: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown": (plugin(), "its model was changed by 'evil' of evil-package, which cannot be applied again"),
    "a module's path": (plugin(name="os:system", distribution="os"), "which cannot be applied again"),
    "a file's path": (plugin(name="../../evil", distribution="x"), "which cannot be applied again"),
    "a file's path as distribution": (plugin(distribution="/tmp/evil:evil"), "which cannot be applied again"),
    "of no distribution": (plugin(distribution=None), "which belongs to no distribution"),
    "of another distribution": (plugin(name="gradient_clipping", id="g", distribution="evil"), "which cannot be applied again"),
    "of another kind": (
        plugin(name="checkpoint_saver", id="c", distribution="kernel-plugin-checkpoint-saver"),
        "cannot be applied again",
    ),
    "not structural": (
        plugin(name="gradient_clipping", id="g", distribution="kernel-plugin-gradient-clipping"),
        "is not one that changes the structure",
    ),
    "callback": (plugin(kind="callbacks"), r"evil \(callbacks\) was in the run that was saved, and is not in this"),
    "unknown option": (
        plugin(name="blurpool", id="b", distribution="kernel-plugin-blurpool", options={"run": "rm"}),
        "cannot be applied again|which cannot be applied",
    ),
    "an option of Python's": (
        plugin(name="blurpool", id="b", distribution="kernel-plugin-blurpool", options={"cls": 1, "self": 2, "name": 3, "id": 4}),
        "cannot be applied again",
    ),
    "an object as option": (
        plugin(name="blurpool", id="b", distribution="kernel-plugin-blurpool", options={"a": [{"$object": "os.system"}]}),
        "an option of blurpool is an object",
    ),
    "names of other types": (plugin(name=["os"]), "its plan is not one"),
    "a distribution of another type": (plugin(distribution=["os"]), "which belongs to no distribution"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plan_that_names_plugins_nobody_wanted_is_refused(copy: Path, name: str) -> None:
    change, problem = PLUGINS[name]
    edit(copy, "lock.json", change)
    before = set(sys.modules)
    refused(copy, CheckpointMismatchError, problem)
    assert {one for one in set(sys.modules) - before if "evil" in one or one in ("os.system",)} == set()


# --- nothing is executed ----------------------------------------------------------------------------------------------

AUDITED = """
import json, runpy, sys

seen, watching = [], False
FORBIDDEN = ("pickle.find_class", "exec", "compile", "import", "os.system", "subprocess.Popen", "marshal.loads", "code.__new__")

def hook(event, arguments):
    if watching and event in FORBIDDEN:
        seen.append([event, repr(arguments)[:200]])

sys.addaudithook(hook)
test, good, others = sys.argv[1], sys.argv[2], sys.argv[3:]
make = runpy.run_path(test)["make"]
for _ in range(2):  # whatever an honest load needs is imported now
    with make(load_path=good) as trainer:
        trainer.fit()
modules = set(sys.modules)
outcomes, watching = [], True
for path in others:
    try:
        make(load_path=path).close()
        outcomes.append("loaded")
    except Exception as error:
        outcomes.append(type(error).__name__)
watching = False
print(json.dumps({"seen": seen, "outcomes": outcomes, "modules": sorted(set(sys.modules) - modules)}))
"""


def test_loading_never_unpickles_executes_compiles_or_imports_what_files_hold(honest: Path, tmp_path: Path) -> None:
    attacks: list[tuple[str, Callable[[Path], Any]]] = [("honest", sign)]
    for name in FILES:
        for data in PICKLES.values():
            attacks.append((name, lambda folder, name=name, data=data: (folder / name).write_bytes(data)))
        attacks.append((name, lambda folder, name=name: torch_pickle(folder / name)))
    for key, (file, change, _) in DOCUMENTS.items():
        attacks.append((key, lambda folder, file=file, change=change: edit(folder, file, change)))
    for key, (change, _) in PLUGINS.items():
        if (
            "blurpool" not in str(change.__closure__ and change.__closure__[0].cell_contents)
            and key != "not structural"
        ):
            attacks.append((key, lambda folder, change=change: edit(folder, "lock.json", change)))
    for value in ({"$dtype": "_dynamo"}, {"$dtype": "onnx"}, {"$object": "antigravity.x"}, {"$tensor": "antigravity"}):
        attacks.append((str(value), lambda folder, value=value: edit(folder, "state.json", put("loop", {"a": value}))))
    paths = []
    for index, (_, attack) in enumerate(attacks):
        folder = Path(shutil.copytree(honest, tmp_path / str(index)))
        attack(folder)
        sign(folder)
        paths.append(str(folder))
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, __file__, str(honest), *paths],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["seen"] == []
    assert told["modules"] == []
    names = [name for name, _ in attacks]
    assert told["outcomes"][0] == "loaded"
    not_refused = {
        name for name, outcome in zip(names, told["outcomes"], strict=True) if not outcome.startswith("Checkpoint")
    }
    assert not_refused == {"honest"}


def test_the_audit_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A control: loading a pickle the unsafe way is seen."""
    torch_pickle(tmp_path / "a.pt")
    code = AUDITED.split("test, good")[0] + (
        "import torch\nwatching = True\ntorch.load(sys.argv[1], weights_only=False)\nimport antigravity_of_no_module\n"
    )
    code = code.replace("import antigravity_of_no_module", "watching = False\nprint(sorted({one for one, _ in seen}))")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.pt")], capture_output=True, text=True, check=False
    )
    assert "'exec'" in done.stdout, done.stderr[-2000:]
    assert "'pickle.find_class'" in done.stdout
