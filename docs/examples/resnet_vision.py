"""Train torchvision's ResNet-18 on scikit-learn's handwritten digits, 8 by 8 pixels made 24 by 24."""

import torch
import torch.nn.functional as F
from kernel_core import TrainableModel, Trainer
from kernel_core.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW
from kernel_plugin_lr_monitor import LRMonitor
from kernel_plugin_speed_monitor import SpeedMonitor
from kernel_plugin_torchvision import import_torchvision
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

# `import torchvision`, which also works where its compiled operators do not fit a CPU build of torch
torchvision = import_torchvision()
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402 - imports torchvision itself


class ResNet18(TrainableModel):
    def __init__(self, num_classes):
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=num_classes)
        self.train_accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro")

    def forward(self, batch):
        inputs, _ = batch
        return self.model(inputs)

    def loss(self, outputs, batch):
        _, targets = batch
        return F.cross_entropy(outputs, targets)

    def get_metrics(self, is_train=False):
        return {"MulticlassAccuracy": self.train_accuracy if is_train else self.val_accuracy}

    def update_metric(self, batch, outputs, metric):
        _, targets = batch
        metric.update(outputs, targets)


torch.manual_seed(17)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
images = F.interpolate(images, size=24, mode="bilinear").expand(-1, 3, -1, -1)
train_dataset, eval_dataset = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

model = ResNet18(num_classes=10)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=64, shuffle=True),
    eval_dataloader=DataLoader(eval_dataset, batch_size=128),
    optimizers=DecoupledSGDW(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur", alpha_f=0.01),
    max_duration="2ep",
    callbacks=[SpeedMonitor(window_size=10), LRMonitor()],
    device="gpu" if torch.cuda.is_available() else "cpu",
    seed=17,
)
trainer.fit()
accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
print(f"accuracy on {len(eval_dataset)} images: {accuracy:.3f}")
