"""Every byte of a checkpoint counts: flips and truncations anywhere are noticed before the model is touched."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Trainer
from kernel_core.checkpoint import loading
from kernel_core.checkpoint.loading import open_checkpoint
from kernel_core.checkpoint.manifest import Manifest
from kernel_core.engine import SingleEngine
from kernel_core.errors import CheckpointCorruptError, CheckpointError
from kernel_core.models import Classifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FLIPS = 300  # in all files but the manifest, of which every byte is flipped
FILES = ["lock.json", "state.json", "rank-00000.json", "model-00000.safetensors", "state-00000.safetensors"]


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Classifier(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.ReLU(), nn.Linear(6, 3)), num_classes=3)


def make(model: nn.Module, **more: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, 4, shuffle=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="2ep",
        run_name="run",
        device="cpu",
        progress_bar=False,
        **more,
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with make(model_of(0), save_folder=str(folder), save_filename="good", save_interval="2ba") as trainer:
        trainer.fit(duration="2ba")
    assert sorted(os.listdir(folder / "good")) == sorted([*FILES, "manifest.json"])
    return Path(folder) / "good"


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def flips(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``data`` with one byte changed: single bits, and whole bytes; the first and last bytes always."""
    chosen = random.Random(seed)
    places = [0, 7, 8, len(data) - 1, *(chosen.randrange(len(data)) for _ in range(count - 4))]
    for place in places:
        mask = chosen.choice([1 << chosen.randrange(8), chosen.randrange(1, 256)])
        yield f"byte {place} ^ {mask:#x}", data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


def opens(folder: Path) -> bool:
    """Say whether a checkpoint passes what every load begins with."""
    try:
        open_checkpoint(SingleEngine(), str(folder)).close()
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_a_flip_anywhere_in_a_file_is_noticed(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    assert opens(copy)
    missed = []
    for what, changed in flips(data, FLIPS // len(FILES), seed=FILES.index(name)):
        (copy / name).write_bytes(changed)
        if opens(copy):
            missed.append(what)
    assert missed == []
    (copy / name).write_bytes(data)
    assert opens(copy)


def test_a_flip_of_every_byte_of_the_manifest_is_noticed(copy: Path) -> None:
    data, missed = (copy / "manifest.json").read_bytes(), []
    Manifest.from_bytes(data, "")
    for place in range(len(data)):
        for mask in (1 << place % 8, 0x20, 0xFF):
            changed = data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]
            try:
                Manifest.from_bytes(changed, "")
                missed.append((place, mask))
            except CheckpointError:
                pass
    assert missed == []


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_file_that_is_cut_or_grows_or_is_not_there_is_noticed(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    lengths = {
        0,
        1,
        7,
        8,
        9,
        len(data) // 2,
        len(data) - 8,
        len(data) - 1,
        *random.Random(1).sample(range(len(data)), 12),
    }
    for length in sorted(lengths):
        (copy / name).write_bytes(data[:length])
        assert not opens(copy), f"{name} of {length} bytes"
    for more in (b"\x00", b" ", b"\n", data):
        (copy / name).write_bytes(data + more)
        assert not opens(copy), f"{name} and {len(more)} bytes more"
    (copy / name).write_bytes(bytes(len(data)))  # what a file system may leave after a power cut
    assert not opens(copy)
    (copy / name).unlink()
    if name == "manifest.json":
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in"):
            open_checkpoint(SingleEngine(), str(copy))
    else:
        with pytest.raises(CheckpointCorruptError, match=rf"{name} is missing. The checkpoint is damaged"):
            open_checkpoint(SingleEngine(), str(copy))


def test_files_of_two_checkpoints_that_were_swapped_are_noticed(copy: Path) -> None:
    one, other = copy / FILES[0], copy / FILES[1]
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    assert not opens(copy)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_the_trainer_refuses_it_by_name_and_the_model_is_as_it_was(
    copy: Path, name: str, damage: str, weights_only: bool
) -> None:
    data = (copy / name).read_bytes()
    middle = len(data) * 2 // 3
    changed = data[:middle] if damage == "cut" else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    (copy / name).write_bytes(changed)
    model = model_of(7)
    before = values(model)
    with pytest.raises(CheckpointError, match=re_of(name)) as told:
        make(model, load_path=str(copy), load_weights_only=weights_only)
    assert "Traceback" not in str(told.value)
    after = values(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def re_of(name: str) -> str:
    return rf"copy/{name}: " if name == "manifest.json" else rf"copy: .*{name}.*The checkpoint is damaged\."


def test_autoresume_takes_the_one_before_a_damaged_one(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with make(model_of(0), save_folder=str(folder), save_filename="ba{batch}", save_interval="2ba") as trainer:
        trainer.fit(duration="4ba")
    path = folder / "ba4" / "state-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with make(
        model_of(7), save_folder=str(folder), save_filename="ba{batch}", save_interval="2ba", autoresume=True
    ) as trainer:
        assert trainer.state.timestamp.batch == 2


def test_without_the_check_flips_in_weights_would_be_loaded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: it is the checksums that notice."""
    path = copy / "model-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not opens(copy)
    monkeypatch.setattr(loading, "verify", lambda files, names: None)
    assert opens(copy)
