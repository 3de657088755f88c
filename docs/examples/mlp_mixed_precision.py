"""Train an MLP of two linear layers in mixed precision, with gradient clipping."""

import torch
import torch.nn.functional as F
from kernel_core import TrainableModel, Trainer
from kernel_plugin_gradient_clipping import GradientClipping
from kernel_plugin_mixed_precision import MixedPrecision
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class MLP(TrainableModel):
    def __init__(self, num_inputs, num_hidden, num_classes):
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, num_hidden)
        self.fc2 = nn.Linear(num_hidden, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro")

    def forward(self, batch):
        inputs, _ = batch
        return self.fc2(F.relu(self.fc1(inputs)))

    def loss(self, outputs, batch):
        _, targets = batch
        return F.cross_entropy(outputs, targets)

    def get_metrics(self, is_train=False):
        return {} if is_train else {"MulticlassAccuracy": self.accuracy}

    def update_metric(self, batch, outputs, metric):
        _, targets = batch
        metric.update(outputs, targets)


torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_dataset, eval_dataset = random_split(dataset, [0.8, 0.2])

model = MLP(num_inputs=64, num_hidden=128, num_classes=10)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=32, shuffle=True),
    eval_dataloader=DataLoader(eval_dataset, batch_size=128),
    optimizers=torch.optim.Adam(model.parameters(), lr=1e-3),
    algorithms=[MixedPrecision(), GradientClipping(clipping_threshold=1.0)],
    max_duration="10ep",
    device="gpu" if torch.cuda.is_available() else "cpu",
    seed=0,
)
trainer.fit()
print(f"precision: {trainer.state.precision}")
print(f"accuracy: {trainer.state.eval_metrics['eval']['MulticlassAccuracy'].compute():.3f}")
