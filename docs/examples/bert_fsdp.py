"""A BERT whose weights are shared out among the ranks, with the configuration that Composer's users write.

On two processes of this machine: kernel launch -n 2 bert_fsdp.py
"""

import ast
import sysconfig
from pathlib import Path

import torch
from kernel_core import Trainer
from kernel_core.optim import DecoupledAdamW
from kernel_plugin_huggingface import HuggingFaceModel
from torch.utils.data import DataLoader, random_split
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertLayer

PARTS = ["asyncio/*.py", "email/*.py", "unittest/*.py"]
LENGTH = 48  # bytes of a text


def load_texts():
    rows = []
    for label, part in enumerate(PARTS):
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob(part)):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = (ast.get_docstring(node) or "").encode()[:LENGTH]
                    if len(text) > 12:
                        ids = torch.zeros(LENGTH, dtype=torch.long)
                        ids[: len(text)] = torch.tensor(list(text))
                        rows.append(
                            {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(label)}
                        )
    return rows


class Bert(HuggingFaceModel):
    def fsdp_wrap_fn(self, module):
        return isinstance(module, BertLayer)


torch.manual_seed(17)
sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
bert = BertForSequenceClassification(BertConfig(vocab_size=256, num_labels=len(PARTS), **sizes))
model = Bert(bert, metrics=[MulticlassAccuracy(num_classes=len(PARTS), average="micro")], use_logits=True)
train_dataset, eval_dataset = random_split(load_texts(), [0.85, 0.15])

fsdp_config = {
    "sharding_strategy": "FULL_SHARD",
    "cpu_offload": False,
    "mixed_precision": "DEFAULT",
    "backward_prefetch": "BACKWARD_POST",
    "activation_checkpointing": False,
    "activation_cpu_offload": False,
    "verbose": True,
}
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=16, shuffle=True),
    eval_dataloader=DataLoader(eval_dataset, batch_size=16),
    optimizers=DecoupledAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6),
    max_duration="2ep",
    device_train_microbatch_size=8,
    fsdp_config=fsdp_config,
    progress_bar=False,
    seed=17,
)
trainer.fit()
accuracy = trainer.state.eval_metric_values["eval/MulticlassAccuracy"].item()
if trainer.state.rank == 0:
    shared = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    print(f"{shared} of {whole} weights on rank 0")
    print(f"accuracy: {accuracy:.3f} on {len(eval_dataset)} texts that it was not trained on")
trainer.close()
