"""Against torchvision's own models trained by hand, closed forms, and real trained-weight files made here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Classifier, Trainer
from kernel_core.errors import ConfigError, OptionError
from kernel_core.registry.options import bind_options
from kernel_plugin_torchvision import import_torchvision, load_matching, torchvision
from torch.nn import functional as F

vision = import_torchvision()

from kernel_plugin_torchvision.metrics import CrossEntropy  # noqa: E402 - torchmetrics imports torchvision


def images(num: int = 8, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 3, 32, 32, generator=generator), torch.randint(classes, (num,), generator=generator)


def test_one_step_of_the_trainer_equals_one_by_hand() -> None:
    torch.manual_seed(0)
    model = torchvision("resnet18", num_classes=5)
    torch.manual_seed(0)
    by_hand = vision.models.resnet18(num_classes=5)
    trainer = Trainer(
        model=model,
        train_dataloader=[images()],
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    x, y = images()
    loss = F.cross_entropy(by_hand(x), y)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(trainer.state.loss, loss.detach())
    for (name, ours), theirs in zip(model.module.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert not torch.equal(model.module.fc.weight, torchvision("resnet18", num_classes=5).module.fc.weight)
    trainer.close()


def test_accuracy_and_cross_entropy_are_those_over_all_images_of_uneven_batches() -> None:
    model = torchvision("shufflenet_v2_x0_5", num_classes=5).eval()
    x, y = images(7)
    batches = [(x[:4], y[:4]), (x[4:6], y[4:6]), (x[6:], y[6:])]
    with Trainer(model=model, eval_dataloader=batches, device="cpu", progress_bar=False) as trainer:
        trainer.eval()
        values = trainer.state.eval_metric_values
    with torch.no_grad():
        scores = model.module(x)
    torch.testing.assert_close(values["eval/CrossEntropy"], F.cross_entropy(scores, y))
    torch.testing.assert_close(values["eval/MulticlassAccuracy"], (scores.argmax(1) == y).float().mean())
    assert list(model.get_metrics(is_train=True)) == ["MulticlassAccuracy"]


def test_cross_entropy_leaves_out_ignored_targets_and_takes_dense_ones() -> None:
    scores, targets = torch.randn(6, 5), torch.tensor([0, 1, -100, 3, 4, -100])
    sparse, dense = CrossEntropy(), CrossEntropy()
    sparse.update(scores[:5], targets[:5])
    sparse.update(scores[5:], targets[5:])
    torch.testing.assert_close(sparse.compute(), F.cross_entropy(scores[[0, 1, 3, 4]], targets[[0, 1, 3, 4]]))
    shares = torch.softmax(torch.randn(6, 5), 1)
    dense.update(scores, shares)
    torch.testing.assert_close(dense.compute(), -(shares * scores.log_softmax(1)).sum(1).mean())


def test_options_reach_the_model() -> None:
    network = torchvision("resnet18", options={"zero_init_residual": True}).module
    assert isinstance(network, vision.models.ResNet)
    assert network.layer1[0].bn2.weight.abs().sum() == 0
    assert network.fc.out_features == 1000


def test_a_model_with_auxiliary_heads_gives_plain_scores_in_training() -> None:
    model = torchvision("googlenet", num_classes=3).train()
    assert model((torch.randn(2, 3, 64, 64), None)).shape == (2, 3)


def weights_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a file of trained weights where torchvision looks before it asks the network."""
    monkeypatch.setenv("TORCH_HOME", str(folder))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    weights = vision.models.get_model_weights("shufflenet_v2_x0_5")["DEFAULT"]
    trained: dict[str, Any] = vision.models.shufflenet_v2_x0_5(num_classes=1000).state_dict()
    (folder / "hub/checkpoints").mkdir(parents=True)
    torch.save(trained, folder / "hub/checkpoints" / weights.url.rpartition("/")[2])
    return trained


def test_trained_weights_are_loaded_and_another_number_of_classes_redraws_the_last_layer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = weights_file(tmp_path, monkeypatch)
    same = torchvision("shufflenet_v2_x0_5", weights="DEFAULT").module.state_dict()
    assert all(torch.equal(same[name], value) for name, value in trained.items())
    other = torchvision("shufflenet_v2_x0_5", num_classes=7, weights="IMAGENET1K_V1").module.state_dict()
    differing = [name for name, value in trained.items() if not torch.equal(other[name], value)]
    assert differing == ["fc.weight", "fc.bias"]


def test_load_matching_says_what_kept_its_values() -> None:
    network = torch.nn.Linear(2, 3)
    assert load_matching(network, {"weight": torch.ones(3, 2), "bias": torch.ones(4), "extra": torch.ones(1)}) == [
        "bias"
    ]
    assert torch.equal(network.weight, torch.ones(3, 2))


def test_unknown_names_and_weights_and_options_are_refused_with_what_would_do() -> None:
    with pytest.raises(OptionError, match=r"torchvision\.model: there is no image classifier 'resnet81'.*'resnet18'"):
        torchvision("resnet81")
    with pytest.raises(OptionError, match="no image classifier 'fasterrcnn_resnet50_fpn'"):
        torchvision("fasterrcnn_resnet50_fpn")
    with pytest.raises(OptionError, match=r"torchvision\.weights: resnet18 has no weights 'IMAGENET'.*IMAGENET1K_V1"):
        torchvision("resnet18", weights="IMAGENET")
    with pytest.raises(OptionError, match=r"torchvision\.options: got \{'wings': 2\}, which resnet18 does not take"):
        torchvision("resnet18", options={"wings": 2})


def test_weights_that_cannot_be_fetched_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(torch.hub, "urlopen", no_network)
    with pytest.raises(ConfigError, match=r"torchvision\.weights: cannot fetch https://.*no route to host"):
        torchvision("shufflenet_v2_x0_5", weights="DEFAULT")


def test_options_are_checked_against_the_annotations() -> None:
    with pytest.raises(OptionError, match=r"model\.num_classes: got 0"):
        bind_options(torchvision, "model", (), {"model": "resnet18", "num_classes": 0})
    with pytest.raises(OptionError, match=r"model\.classes: unknown option"):
        bind_options(torchvision, "model", (), {"model": "resnet18", "classes": 3})
    bound = bind_options(torchvision, "model", (), {"model": "shufflenet_v2_x0_5", "num_classes": 4})
    assert isinstance(torchvision(*bound.args, **bound.kwargs), Classifier)


def run(code: str) -> str:
    # the workspace's own environment mends torchvision for everybody; here the package must do it alone
    alone = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != 'torchvision_on_cpu']"
    )
    done = subprocess.run([sys.executable, "-c", f"{alone}\n{code}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fresh_process_imports_nothing_early_and_then_trains_a_model() -> None:
    code = """
import sys, kernel_plugin_torchvision as package
print({"torchvision", "torchmetrics"} & set(sys.modules))
import torch
vision = package.import_torchvision()
assert package.import_torchvision() is vision
vision.models.resnet18()(torch.randn(2, 3, 32, 32)).sum().backward()
from torchvision.transforms import v2
print(v2.RandAugment()(torch.zeros(3, 8, 8, dtype=torch.uint8)).shape)
"""
    assert run(code) == "set()\ntorch.Size([3, 8, 8])\n"


# As torchvision does where its compiled operators are missing, on any machine.
BROKEN = """
import torch
from torchvision import part
try:
    torch.ops.torchvision.nms.default
except AttributeError:
    raise RuntimeError("operator torchvision::{operator} does not exist") from None
part.complete = True
"""


def test_the_fallback_answers_exactly_one_error(tmp_path: Path) -> None:
    for operator in ("roi_align", "nms"):
        package = tmp_path / operator / "torchvision"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(BROKEN.format(operator=operator))
        (package / "part.py").write_text("complete = False\n")
    code = f"""
import gc, sys, torch
from kernel_plugin_torchvision.compat import import_torchvision
sys.path.insert(0, {str(tmp_path / "roi_align")!r})
try:
    import_torchvision()
except RuntimeError as error:
    print(error)
print(hasattr(torch.ops.torchvision, "qnms"))
sys.path[0] = {str(tmp_path / "nms")!r}
print(import_torchvision().part.complete)
gc.collect()
print(torch.ops.torchvision.qnms.default)
"""
    expected = ["operator torchvision::roi_align does not exist", "False", "True", "torchvision.qnms.default"]
    assert run(code).splitlines() == expected
