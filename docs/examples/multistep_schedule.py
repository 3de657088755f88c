"""Divide the learning rate by ten at 30, 50 and 90 percent of training, however long that is."""

import torch
from kernel_core import Classifier, Trainer
from kernel_core.optim import DecoupledSGDW, MultiStepScheduler
from kernel_plugin_in_memory_logger import InMemoryLogger
from kernel_plugin_lr_monitor import LRMonitor
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_dataset, eval_dataset = random_split(dataset, [0.8, 0.2])

module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = Classifier(module, num_classes=10)
logger = InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=32, shuffle=True),
    eval_dataloader=DataLoader(eval_dataset, batch_size=128),
    optimizers=DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9),
    schedulers=MultiStepScheduler(milestones=["0.3dur", "0.5dur", "0.9dur"]),
    max_duration="10ep",
    callbacks=LRMonitor(),
    loggers=logger,
    seed=0,
)
trainer.fit()

series = logger.get_timeseries("lr-DecoupledSGDW/group0")
previous = None
for batch, lr in zip(series["batch"], series["lr-DecoupledSGDW/group0"], strict=True):
    if lr != previous:
        print(f"from batch {batch} of {series['batch'][-1]} on: learning rate {lr:g}")
    previous = lr
print(f"accuracy: {trainer.state.eval_metrics['eval']['MulticlassAccuracy'].compute():.3f}")
