"""Use one of torch's own learning rate schedulers. It is stepped once an epoch, as in torch."""

import torch
from kernel_core import Classifier, Trainer
from kernel_plugin_in_memory_logger import InMemoryLogger
from kernel_plugin_lr_monitor import LRMonitor
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_dataset, eval_dataset = random_split(dataset, [0.8, 0.2])

module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = Classifier(module, num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
logger = InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=32, shuffle=True),
    eval_dataloader=DataLoader(eval_dataset, batch_size=128),
    optimizers=optimizer,
    # with step_schedulers_every_batch=True, total_iters would be a number of batches
    schedulers=LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=4),
    max_duration="6ep",
    callbacks=LRMonitor(),
    loggers=logger,
    seed=0,
)
trainer.fit()

series = logger.get_timeseries("lr-SGD/group0")
for epoch in range(6):
    (rates,) = {round(float(lr), 6) for lr in series["lr-SGD/group0"][series["epoch"] == epoch]}
    print(f"epoch {epoch}: learning rate {rates:g}")
print(f"accuracy: {trainer.state.eval_metrics['eval']['MulticlassAccuracy'].compute():.3f}")
