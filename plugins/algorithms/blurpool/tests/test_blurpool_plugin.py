"""The adapter, in the kernel's own surgery."""

import pytest
import torch
from kernel_core import Classifier, Trainer
from kernel_core.errors import OptionError, SurgeryError
from kernel_plugin_blurpool import BlurConv2d, BlurPool
from torch import nn


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(16 * 2 * 2, 4),
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(3)]


def test_a_run_replaces_reports_and_trains() -> None:
    net = small_net()
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Trainer(
        model=Classifier(net),
        train_dataloader=batches(),
        max_duration="1ep",
        optimizers=optimizer,
        algorithms=[BlurPool()],
        device="cpu",
        progress_bar=False,
    ) as trainer:
        assert [(one.path, one.plugin, one.old, one.new) for one in trainer.surgery_report.changes] == [
            ("module.1", "blurpool", "MaxPool2d", "BlurMaxPool2d"),
            ("module.2", "blurpool", "Conv2d", "BlurConv2d"),
        ]
        trainer.fit()
    assert isinstance(net[2], BlurConv2d)
    assert list(net.state_dict()) == list(small_net().state_dict())
    assert all(not torch.equal(value, before[name]) for name, value in net.named_parameters())


def test_a_model_without_strides_has_nothing_to_blur() -> None:
    with pytest.raises(SurgeryError, match="blurpool: its surgery had no effect on this model"):
        Trainer(
            model=Classifier(nn.Sequential(nn.Conv2d(16, 4, 3), nn.MaxPool2d(3, 1))),
            train_dataloader=batches(),
            max_duration="1ep",
            algorithms=[BlurPool()],
            device="cpu",
            strict=True,
            progress_bar=False,
        )


def test_options_reach_the_layers_and_ill_typed_ones_are_refused() -> None:
    replacements = BlurPool(blur_first=False, min_channels=4).module_replacements()
    layer = replacements[nn.Conv2d](nn.Conv2d(4, 4, 3, stride=2), "conv")
    assert isinstance(layer, BlurConv2d)
    assert not layer.blur_first
    assert list(BlurPool(replace_maxpools=False).module_replacements()) == [nn.Conv2d]
    with pytest.raises(OptionError, match=r"blurpool\.min_channels: got 'many', expected int"):
        BlurPool(min_channels="many")  # type: ignore[arg-type]
