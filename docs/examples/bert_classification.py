"""Fine-tune a BERT classifier: which package of Python's standard library does a sentence of documentation come from?"""

import ast
import sysconfig
from pathlib import Path

import torch
import transformers
from kernel_core import Trainer
from kernel_core.optim import DecoupledAdamW, LinearWithWarmupScheduler
from kernel_plugin_early_stopper import EarlyStopper
from kernel_plugin_file_logger import FileLogger
from kernel_plugin_gradient_clipping import GradientClipping
from kernel_plugin_huggingface import CrossEntropy, HuggingFaceModel
from kernel_plugin_in_memory_logger import InMemoryLogger
from kernel_plugin_lr_monitor import LRMonitor
from kernel_plugin_memory_monitor import MemoryMonitor
from kernel_plugin_speed_monitor import SpeedMonitor
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

PACKAGES = ["asyncio", "email", "unittest", "_pydecimal.py"]


def load_sentences() -> list[tuple[str, int]]:
    """Return the paragraphs of all docstrings and the number of their package."""
    library, samples = Path(sysconfig.get_path("stdlib")), []
    for label, package in enumerate(PACKAGES):
        for file in sorted((library / package).rglob("*.py")) or [library / package]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
                    samples += [(text, label) for text in paragraphs if len(text.split()) > 4]
    return samples


def load_model_and_tokenizer(texts: list[str]):
    """Build a small BERT and its tokenizer on the spot, so that nothing is downloaded.

    From the hub it would be:
        tokenizer = transformers.AutoTokenizer.from_pretrained("google-bert/bert-base-uncased")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            "google-bert/bert-base-uncased", num_labels=len(PACKAGES)
        )
    """
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=4000, special_tokens=special))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], special))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        num_labels=len(PACKAGES),
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config), tokenizer


torch.manual_seed(42)
samples = load_sentences()
hf_model, tokenizer = load_model_and_tokenizer([text for text, _ in samples])
encoded = tokenizer([text for text, _ in samples], padding="max_length", truncation=True, max_length=32)
dataset = [
    {"input_ids": ids, "attention_mask": mask, "labels": label}
    for ids, mask, (_, label) in zip(encoded["input_ids"], encoded["attention_mask"], samples)
]
import collections; print(len(dataset), collections.Counter(l for _, l in samples))
train_set, eval_set = torch.utils.data.random_split(dataset, [0.85, 0.15])
collate = transformers.default_data_collator

model = HuggingFaceModel(
    hf_model,
    tokenizer=tokenizer,
    metrics=[CrossEntropy(), MulticlassAccuracy(num_classes=len(PACKAGES), average="micro")],
    use_logits=True,
)
in_memory = InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=collate),
    eval_dataloader=DataLoader(eval_set, batch_size=64, collate_fn=collate),
    optimizers=DecoupledAdamW(model.parameters(), lr=2e-5, weight_decay=0.01),
    schedulers=LinearWithWarmupScheduler(t_warmup="0.06dur", alpha_f=0.0),
    max_duration="3ep",
    device_train_microbatch_size=16,
    precision="amp_bf16",
    algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
    callbacks=[
        SpeedMonitor(window_size=50),
        LRMonitor(),
        MemoryMonitor(),
        EarlyStopper(monitor="metrics/train/CrossEntropy", patience="2ep"),
    ],
    loggers=[FileLogger(filename="training_log.txt", flush_interval=50), in_memory],
    seed=42,
    progress_bar=True,
)
trainer.eval()
before = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
trainer.fit()
after = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
loss = in_memory.get_timeseries("loss/train/total")["loss/train/total"]
print(f"loss {loss[0]:.3f} -> {loss[-1]:.3f}")
print(f"accuracy {before:.3f} -> {after:.3f}")
trainer.close()
