"""torch.distributed.checkpoint reads and writes checkpoints of the kernel through the adapters."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kernel_core import Trainer
from kernel_core.checkpoint.dcp import KernelStorageReader, KernelStorageWriter
from kernel_core.checkpoint.files import LocalFiles, is_intact
from kernel_core.checkpoint.locate import locate
from kernel_core.checkpoint.reader import Reader
from kernel_core.models import Classifier
from kernel_core.testing.ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden" / "version-1"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(7, 3, generator=generator),
        "a.half": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(3 + seed),
        "none": torch.empty(0, 2),
        "flag": torch.tensor([True, False]),
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def whole(one: Any) -> Tensor:
        return one.full_tensor() if hasattr(one, "full_tensor") else one  # type: ignore[no-any-return]

    return [name for name in a if not torch.equal(whole(a[name]), whole(b[name])) or a[name].dtype != b[name].dtype]


def blank(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_what_torch_saves_is_a_checkpoint_of_the_kernel(tmp_path: Path) -> None:
    dcp.save(weights(), storage_writer=KernelStorageWriter(tmp_path / "a"))
    found = locate(str(tmp_path / "a"))
    assert is_intact(found)
    assert found.manifest.weights_only
    assert sorted(os.listdir(tmp_path / "a")) == sorted(["manifest.json", *found.manifest.files])
    tensors = Reader(found, LocalFiles(found)).tensors("model")
    assert set(tensors) == set(weights())
    assert differing(weights(), {name: tensor.whole() for name, tensor in tensors.items()}) == []
    assert differing(weights(), load_file(tmp_path / "a" / "model-00000.safetensors")) == []


def test_torch_loads_it_again(tmp_path: Path) -> None:
    dcp.save(weights(), checkpoint_id=tmp_path / "b", storage_writer=KernelStorageWriter(tmp_path / "a"))
    loaded = blank(weights())
    dcp.load(loaded, checkpoint_id=tmp_path / "b", storage_reader=KernelStorageReader("elsewhere"))
    assert differing(weights(), loaded) == []


def test_torch_loads_the_weights_of_a_run() -> None:
    loaded = blank(load_file(GOLDEN / "model-00000.safetensors"))
    dcp.load(loaded, storage_reader=KernelStorageReader(GOLDEN))
    assert differing(load_file(GOLDEN / "model-00000.safetensors"), loaded) == []


def test_the_trainer_loads_what_torch_saved(tmp_path: Path) -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Classifier(nn.Linear(4, 3), num_classes=3)

    saved = model(1)
    dcp.save(dict(saved.state_dict()), storage_writer=KernelStorageWriter(tmp_path / "a"))
    for more in ({}, {"load_weights_only": True}):
        with Trainer(
            model=model(2), load_path=str(tmp_path / "a"), device="cpu", progress_bar=False, max_duration="1ep", **more
        ) as trainer:
            assert differing(dict(saved.state_dict()), dict(trainer.state.model.state_dict())) == []


def test_what_torch_would_pickle_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        BaseException, match=r"optimizer.lr: is no tensor, so that torch.distributed.checkpoint would pickle"
    ):
        dcp.save({"w": torch.ones(1), "optimizer": {"lr": 0.1}}, storage_writer=KernelStorageWriter(tmp_path / "a"))
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_tensors_that_have_no_place_in_the_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match=r"w: has dtype torch.complex128"):
        dcp.save({"w": torch.ones(1, dtype=torch.complex128)}, storage_writer=KernelStorageWriter(tmp_path / "a"))
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    dcp.save(weights(), storage_writer=KernelStorageWriter(tmp_path / "a"))
    with pytest.raises(BaseException, match=r"is a checkpoint already. Expected a new folder"):
        dcp.save(weights(1), storage_writer=KernelStorageWriter(tmp_path / "a"))
    assert is_intact(locate(str(tmp_path / "a")))


def test_a_damaged_file_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    dcp.save(weights(), storage_writer=KernelStorageWriter(tmp_path / "a"))
    path = tmp_path / "a" / "model-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    loaded = blank(weights())
    with pytest.raises(BaseException, match=r"the content of model-00000.safetensors is not what was written"):
        dcp.load(loaded, storage_reader=KernelStorageReader(tmp_path / "a"))
    assert not any(bool(tensor.any()) for tensor in loaded.values())


def test_a_tensor_that_is_not_there_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    dcp.save(weights(), storage_writer=KernelStorageWriter(tmp_path / "a"))
    for asked in ({"missing": torch.ones(1)}, {"a.weight": torch.ones(3, 7)}):
        with pytest.raises(BaseException, match=next(iter(asked))):
            dcp.load(asked, storage_reader=KernelStorageReader(tmp_path / "a"))


def test_the_files_hold_no_pickle_and_reading_them_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save(weights(), storage_writer=KernelStorageWriter(tmp_path / "a"))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    loaded = blank(weights())
    dcp.load(loaded, storage_reader=KernelStorageReader(tmp_path / "a"))
    assert differing(weights(), loaded) == []


def test_saving_and_loading_as_ever_imports_no_adapter() -> None:
    code = (
        "import sys, kernel_core, kernel_core.train.trainer, kernel_core.checkpoint.restore\n"
        "raise SystemExit('kernel_core.checkpoint.dcp' in sys.modules or 'torch.distributed.checkpoint' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documented_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        (Path(__file__).parents[2] / "docs" / "checkpoint-format.md")
        .read_text()
        .split("## torch.distributed.checkpoint")[1]
    )
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"weights": weights()}
    exec(text.split("```python\n")[1].split("```")[0], scope)  # the page's own words
    assert differing(weights(), scope["again"]) == []


# --- on ranks ---------------------------------------------------------------------------------------------------------


def sharded(mesh: Any, seed: int) -> dict[str, Any]:
    """Return the weights over ``mesh``: rows of all axes, some of them replicated."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found: dict[str, Any] = dict(weights(seed))
    rest = [Replicate()] * (mesh.ndim - 1)
    found["a.weight"] = distribute_tensor(found["a.weight"], mesh, [*rest, Shard(0)])
    found["a.half"] = distribute_tensor(found["a.half"], mesh, [*rest, Shard(0)])
    found["flag"] = distribute_tensor(found["flag"], mesh, [*rest, Replicate()])
    return found


def on_ranks(folder: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    dcp.save(sharded(one, 0), storage_writer=KernelStorageWriter(f"{folder}/two"))
    wrong = []
    for mesh in (one, two):
        loaded = blank(sharded(mesh, 0))
        dcp.load(loaded, storage_reader=KernelStorageReader(f"{folder}/two"))
        wrong += differing(weights(), loaded)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.ranks
@pytest.mark.slow
def test_shards_are_written_by_their_ranks_and_read_on_any_layout(tmp_path: Path) -> None:
    assert run_on_ranks(2, __file__, "on_ranks", str(tmp_path), timeout_s=60) == [[]] * 2
    found = locate(str(tmp_path / "two"))
    assert is_intact(found)
    tensors = Reader(found, LocalFiles(found)).tensors("model")
    assert differing(weights(), {name: tensor.whole() for name, tensor in tensors.items()}) == []
    assert len(tensors["a.weight"].pieces) == 2
    loaded = blank(weights())
    dcp.load(loaded, storage_reader=KernelStorageReader(tmp_path / "two"))
    assert differing(weights(), loaded) == []
