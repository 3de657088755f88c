"""Weights of others begin a run: Composer's files, plain state dicts, safetensors, Hugging Face's folders."""

import collections
import datetime
import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core import Classifier, Trainer
from kernel_core.checkpoint.contents import read_lock
from kernel_core.checkpoint.export import Weights, export_file, export_folder
from kernel_core.checkpoint.foreign import is_foreign, open_foreign, renamed
from kernel_core.checkpoint.locate import locate
from kernel_core.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointMissingError
from kernel_core.testing.ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Shapes that two ranks do not share evenly, a buffer, and a parameter with two names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.last.weight

    def forward(self, x: Tensor) -> Any:
        return self.again(self.last(self.norm(self.first(x))))


def make(path: Any, seed: int = 1, model: Classifier | None = None, **arguments: Any) -> Trainer:
    model = model or Classifier(Net(seed))
    data = TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, 4),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        load_path=None if path is None else str(path),
        progress_bar=False,
        device="cpu",
        **arguments,
    )


def wanted() -> dict[str, Tensor]:
    return Net(7).state_dict()


def loaded(path: Any, **arguments: Any) -> dict[str, Tensor]:
    with make(path, **arguments) as trainer:
        assert trainer.loaded_from == str(path)
        assert trainer.state.progress.batch == 0
        return trainer.state.model.module.state_dict()  # type: ignore[union-attr, operator]


def check(found: dict[str, Tensor]) -> None:
    expected = wanted()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in wanted().items()}


def composer(prefix: str = "module.") -> dict[str, Any]:
    """Return what Composer saves: the documented structure, with clocks and NumPy's generator in it."""
    timestamp = {"epoch": 1, "batch": 2, "total_wct": datetime.timedelta(seconds=3)}
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": []}
    state = {
        "model": collections.OrderedDict(prefixed(prefix)),
        "optimizers": {"SGD": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["first.weight"]}]}},
        "timestamp": {"Timestamp": timestamp},
        "rank_zero_seed": 17,
        "run_name": "theirs",
        "algorithms": [("BlurPool", {"repr": "BlurPool(replace_convs=True)"})],
        "integrations": {},
        "metadata": {"composer_env_info": {"composer_version": "0.32"}, "torch_version": "2.7"},
    }
    return {"state": state, "rng": [rng]}


def no_second_name(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "again" not in name}


FILES: dict[str, Any] = {
    "composer.pt": composer,
    "ddp.pt": lambda: prefixed("module.module."),
    "compiled.pth": lambda: prefixed("_orig_mod."),
    "compiled-inside.bin": lambda: {name.replace("first", "first._orig_mod"): v for name, v in wanted().items()},
    "plain.pt": wanted,
    "lightning.ckpt": lambda: {"state_dict": prefixed("model."), "epoch": 3, "global_step": 7},
    "tutorial.pt": lambda: {"epoch": 1, "model_state_dict": wanted(), "loss": 0.5},
    "without-suffix": wanted,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_torch_gives_its_weights_whatever_was_wrapped_around_them(name: str, tmp_path: Path) -> None:
    torch.save(FILES[name](), tmp_path / name)
    check(loaded(tmp_path / name))


def test_files_of_before_torch_1_6_are_read_too(tmp_path: Path) -> None:
    torch.save(wanted(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    check(loaded(tmp_path / "old.pt"))


def test_safetensors_and_folders_of_hugging_face(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in wanted().items()}
    save_file(state, tmp_path / "one.safetensors")
    check(loaded(tmp_path / "one.safetensors"))
    check(loaded(f"file://{tmp_path}/one.safetensors"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (whole / "model.safetensors").symlink_to(tmp_path / "one.safetensors")  # as the hub's cache has it
    check(loaded(whole))
    names = list(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, mine in parts.items():
        save_file({name: state[name] for name in mine}, cut / file)
    index = {"weight_map": {name: file for file, mine in parts.items() for name in mine}}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    check(loaded(cut))
    (cut / "b.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=r"names b\.safetensors, which is not there"):
        make(cut)
    (cut / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../one.safetensors"}}')
    with pytest.raises(CheckpointFormatError, match="is not an index of weights"):
        make(cut)


def test_a_parameter_with_two_names_needs_one_of_them(tmp_path: Path) -> None:
    save_file({name: value.clone() for name, value in no_second_name(wanted()).items()}, tmp_path / "w.safetensors")
    check(loaded(tmp_path / "w.safetensors"))


def test_dtypes_are_those_of_the_model(tmp_path: Path) -> None:
    state = {name: value.double() if value.is_floating_point() else value for name, value in wanted().items()}
    torch.save(state, tmp_path / "double.pt")
    check(loaded(tmp_path / "double.pt"))


def test_a_prefix_is_changed_only_where_names_fit_better_then() -> None:
    own = dict.fromkeys(["model.a", "model.b"])
    tensor = torch.zeros(1)
    same, note = renamed({"model.a": tensor, "model.b": tensor}, own)
    assert (list(same), note) == (["model.a", "model.b"], "")
    stripped, note = renamed({"module.model.a": tensor, "module.model.b": tensor}, own)
    assert list(stripped) == ["model.a", "model.b"]
    assert note == "the names lose module., so that 2 of 2 fit."
    added, note = renamed({"a": tensor, "b": tensor}, own)
    assert list(added) == ["model.a", "model.b"]
    assert note == "the names get model., so that 2 of 2 fit."
    mixed, note = renamed({"module.a": tensor, "b": tensor}, dict.fromkeys(["a", "c"]))
    assert (list(mixed), note) == (["module.a", "b"], "")


def test_names_and_shapes_are_checked_as_for_any_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    state = wanted()
    torch.save({**state, "more": torch.ones(2)}, path)
    with pytest.raises(CheckpointMismatchError, match=r"the names differ: 0 missing, 1 unexpected"):
        make(path)
    check(loaded(path, load_strict_model_weights=False))
    check(loaded(path, load_ignore_keys=["model/module.more"]))
    torch.save({name: value for name, value in state.items() if not name.startswith("first")}, path)
    with pytest.raises(CheckpointMismatchError, match=r"2 missing, 0 unexpected"):
        make(path)
    torch.save({**state, "first.weight": torch.ones(5, 4)}, path)
    with pytest.raises(CheckpointMismatchError, match=r"shapes differ"):
        make(path, load_strict_model_weights=False)
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointMismatchError, match=r"no tensor of the model is in the checkpoint"):
        make(path, load_strict_model_weights=False)


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return open, (self.target, "w")


REFUSED = [
    (
        "archive.tar.gz",
        b"x",
        "is an archive or compressed. Expected a file that can be mapped into memory. Unpack it first",
    ),
    ("ep1.tar", b"x", "composer_states.pt"),
    ("ep1-ba2-rank0.pt.zst", b"x", "zstd -d"),
    ("lfs.pt", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    ("text.pt", b"hello world, this is text", "is no file of weights|needs code"),
    ("empty.pt", b"", "is no file of weights"),
    ("broken.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{" + b"x" * 20, "is not JSON as a checkpoint holds it"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_what_is_no_file_of_weights_is_refused_by_a_message(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=message):
        make(tmp_path / name)


def test_a_pickle_that_needs_code_is_refused_and_its_code_does_not_run(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    path = tmp_path / "w.pt"
    torch.save({**wanted(), "code": Planted(str(planted))}, path)
    with pytest.raises(CheckpointFormatError, match=r"needs code to be read: \w*io\.open.*is refused"):
        make(path)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Planted(str(planted)), 2))
    with pytest.raises(CheckpointFormatError, match=r"needs code"):
        make(tmp_path / "raw.pt")
    torch.save(Net(), path)
    with pytest.raises(CheckpointFormatError, match=r"needs code to be read: .*Net"):
        make(path)
    assert not planted.exists()


def test_what_holds_no_state_dict_says_what_it_holds(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "args": {"lr": 0.1}}, tmp_path / "w.pt")
    with pytest.raises(CheckpointMismatchError, match=r"holds a dict of epoch, args. Expected a state dict"):
        make(tmp_path / "w.pt")
    torch.save([1, 2], tmp_path / "w.pt")
    with pytest.raises(CheckpointMismatchError, match=r"holds a list"):
        make(tmp_path / "w.pt")
    with pytest.raises(CheckpointMissingError, match=r"there is no file .*nothing\.pt"):
        make(tmp_path / "nothing.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointFormatError, match=r"dcp_to_torch"):
        make(tmp_path / "dcp")


def test_folders_of_checkpoints_are_none_of_others(tmp_path: Path) -> None:
    with make(None) as trainer:
        url = trainer.save_checkpoint(tmp_path / "checkpoints")
    assert not is_foreign(url)
    assert not is_foreign(str(tmp_path / "checkpoints"))
    assert not is_foreign(str(tmp_path / "checkpoints" / "latest"))
    assert is_foreign("s3://bucket/ep1.pt")
    assert not is_foreign("s3://bucket/run/ep1-ba2")


def test_an_exported_file_is_every_name_of_the_model_and_begins_another_run(tmp_path: Path) -> None:
    with make(None, seed=7) as trainer:
        url = trainer.save_checkpoint(tmp_path / "checkpoints", weights_only=True)
    with Weights(locate(url)) as weights:
        export_file(weights, tmp_path / "w.safetensors")
        export_file(weights, tmp_path / "half.safetensors", "bfloat16")
    found = load_file(tmp_path / "w.safetensors")
    Classifier(Net()).load_state_dict(found)  # strict
    check({name.removeprefix("module."): value for name, value in found.items()})
    check(loaded(tmp_path / "w.safetensors"))
    for name, value in load_file(tmp_path / "half.safetensors").items():
        expected = found[name].bfloat16() if found[name].is_floating_point() else found[name]
        assert torch.equal(value, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "half.safetensors", "w.safetensors"]


class Described(Classifier):
    files: dict[str, Any] = {"config.json": {"width": 5, "dtype": "float32"}}

    def export_form(self) -> dict[str, Any]:
        return {"format": "theirs", "prefix": "module.", "files": self.files}


def test_a_model_says_how_another_library_reads_it_and_not_where_files_go(tmp_path: Path) -> None:
    with make(None, model=Described(Net(7))) as trainer:
        urls = [trainer.save_checkpoint(tmp_path / "checkpoints", "good")]
        for number, name in enumerate(("../evil.json", "a/b.json", "run.py", ".hidden.json")):
            trainer.state.model.files = {name: {}}  # type: ignore[assignment]
            urls.append(trainer.save_checkpoint(tmp_path / "checkpoints", f"bad{number}"))
    found = [locate(url) for url in urls]
    with Weights(found[0]) as weights:
        export_folder(weights, read_lock(found[0]), tmp_path / "out", "theirs", "float16")
        with pytest.raises(CheckpointMismatchError, match=r"does not hold how other describes its model, a Described"):
            export_folder(weights, read_lock(found[0]), tmp_path / "other", "other")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"width": 5, "dtype": "float16"}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == wanted().keys()
    for one in found[1:]:
        with Weights(one) as weights, pytest.raises(CheckpointFormatError, match=r"its files for theirs are named"):
            export_folder(weights, read_lock(one), tmp_path / "bad", "theirs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def on_ranks(folder: str, engine: Any) -> bool:
    """Load a file into a model that is shared out, save it, and compare what each rank holds."""
    sys.modules.setdefault(__name__, sys.modules["__main__"])
    trainer = make(f"{folder}/w.pt", parallelism=engine)
    state = trainer.state.engine.model_state(trainer.state.model, full=True)
    trainer.save_checkpoint(f"{folder}/{len(str(engine))}")
    trainer.close()
    expected = {f"module.{name}": value for name, value in wanted().items()}
    return trainer.state.rank > 0 or all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_take_their_parts_and_the_export_puts_them_together(engine: str, tmp_path: Path) -> None:
    torch.save(composer(), tmp_path / "w.pt")
    assert run_on_ranks(2, __file__, "on_ranks", str(tmp_path), engine) == [True, True]
    with Weights(locate(str(tmp_path / str(len(engine))))) as weights:
        assert weights.reader.manifest.world_size == 2
        export_file(weights, tmp_path / "w.safetensors")
    check({name.removeprefix("module."): value for name, value in load_file(tmp_path / "w.safetensors").items()})


def test_reading_maps_the_file_instead_of_copying_it(tmp_path: Path) -> None:
    big = {"a": torch.arange(1 << 18, dtype=torch.float32)}
    torch.save(big, tmp_path / "w.pt")
    save_file(big, tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        found = open_foreign(str(tmp_path / name)).tensors["a"]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
        ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
        assert any(start <= found.data_ptr() < end for start, end in ranges), name
        assert torch.equal(found, big["a"])
