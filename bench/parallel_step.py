"""Steps of a GPT under each engine against a hand-written loop: tokens a second, their ratio, and the share of the peak (MFU).

    python bench/parallel_step.py                                             # small; on a CPU a trial of the program itself
    python bench/parallel_step.py --model 125m --precision amp_bf16           # one GPU
    python bench/parallel_step.py --model 1b --precision amp_bf16 --compile --checkpoint-activations
    kernel launch -n 2 bench/parallel_step.py --engines ddp,fsdp              # several ranks: against plain DDP by hand

transformers' GPT-2 without dropout, AdamW, the same batches for all. The hand-written loop is plain torch: autocast, compile
and activation checkpointing as asked for, on several ranks inside DistributedDataParallel; with --like-for-like the loop that
stands beside fsdp shards its blocks with fully_shard itself. Each engine's run stands beside one
of the loop, in turns; figures are medians over the pairs [least, greatest]. The clock starts at the third step and stops when
the device is done. MFU counts 6 floating point operations for each weight and token, and 12 for each layer, width, position and
token of attention (Chowdhery et al., PaLM, 2022, appendix B), over the dense peak of the device in the table below; of an
unknown device none is printed.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_core import Callback, Trainer, hookimpl
from kernel_plugin_huggingface import HuggingFaceModel
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

# dense bf16 tensor operations a second, from the makers' data sheets
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
SIZES = {  # layers, width, heads, positions, rows of a batch
    "tiny": (2, 128, 4, 128, 4),
    "125m": (12, 768, 12, 1024, 16),
    "1b": (24, 1792, 14, 1024, 8),
}
WARM_UP = 2


def sync(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


class Clock(Callback):
    """Takes the time when the first steps are done."""

    def __init__(self) -> None:
        self.started = 0.0

    @hookimpl
    def batch_end(self, state: Any) -> None:
        if state.progress.batch == WARM_UP:
            sync(state.device)
            self.started = time.perf_counter()


class Case:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        layers, width, heads, self.length, self.rows = SIZES[arguments.model]
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": self.length}
        self.config = GPT2Config(**sizes, **dropout, vocab_size=50304, use_cache=False)
        if arguments.model == "tiny":
            self.config.vocab_size = 256
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, int(os.environ.get("LOCAL_RANK", "0")))
            torch.accelerator.set_device_index(self.device.index)
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(self.config.vocab_size, (self.rows, self.length), generator=generator) for _ in range(4)]
        self.batches = [ids[step % 4] for step in range(arguments.steps + WARM_UP)]
        self.tokens = arguments.steps * self.rows * self.length

    def flops_per_token(self) -> float:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in GPT2LMHeadModel(self.config).parameters())
        return 6.0 * weights + 12.0 * self.config.n_layer * self.config.n_embd * self.length

    def model(self) -> GPT2LMHeadModel:
        torch.manual_seed(0)
        return GPT2LMHeadModel(self.config).to(self.device)

    def by_hand(self, shards: bool) -> float:
        """Return tokens a second of this rank in a plain loop."""
        model: Any = self.model()
        if self.arguments.checkpoint_activations:
            for block in model.transformer.h:
                plain = block.forward
                block.forward = lambda *args, plain=plain, **kwargs: checkpoint(
                    plain, *args, use_reentrant=False, **kwargs
                )
        if self.arguments.compile:
            model.compile()
        if shards:
            for block in model.transformer.h:
                fully_shard(block)
            fully_shard(model)
        elif torch.distributed.is_initialized():
            ids = None if self.device.type == "cpu" else [self.device]
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.arguments.precision == "amp_bf16")
        for step, ids in enumerate(self.batches):
            if step == WARM_UP:
                sync(self.device)
                started = time.perf_counter()
            batch = ids.to(self.device, non_blocking=True)
            optimizer.zero_grad()
            with autocast:
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
        sync(self.device)
        return self.tokens / (time.perf_counter() - started)

    def by_kernel(self, engine: str) -> float:
        """Return tokens a second of this rank under an engine."""
        model, clock = HuggingFaceModel(self.model()), Clock()
        parallelism: dict[str, Any] = {engine: {}}
        if self.arguments.checkpoint_activations:
            parallelism["activation_checkpointing"] = {}
        trainer = Trainer(
            model=model,
            train_dataloader=[{"input_ids": ids, "labels": ids} for ids in self.batches],
            max_duration=f"{len(self.batches)}ba",
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            callbacks=[clock],
            parallelism=parallelism,
            precision=self.arguments.precision,
            compile_config={} if self.arguments.compile else None,
            device=self.device,
            progress_bar=False,
            seed=0,
        )
        with trainer:
            trainer.fit()
            sync(self.device)
            return self.tokens / (time.perf_counter() - clock.started)


def figures(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="tiny")
    parser.add_argument("--engines", help="some of single,ddp,fsdp; the default is those that suit the number of ranks")
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--like-for-like", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    engines = (arguments.engines or ("ddp,fsdp" if several else "single,ddp,fsdp")).split(",")
    case, speaks = Case(arguments), os.environ.get("RANK", "0") == "0"
    name = torch.cuda.get_device_name() if case.device.type == "cuda" else case.device.type
    peak = next((value for word, value in PEAKS.items() if word in name), None)
    if speaks:
        print(
            f"{arguments.model}, {case.rows} x {case.length} tokens, {arguments.precision}, torch {torch.__version__}, {name}"
        )
        print(f"{'':8}{'ratio to the loop':26}{'tokens a second a rank':34}{'MFU':6}by hand")
    for engine in engines:
        by_kernel: Callable[[], float] = lambda engine=engine: case.by_kernel(engine)  # type: ignore[misc] # noqa: E731
        by_kernel()  # joins the ranks, compiles
        shards = arguments.like_for_like and engine == "fsdp"
        case.by_hand(shards)
        pairs = [(by_kernel(), case.by_hand(shards)) for _ in range(arguments.pairs)]
        if speaks:
            ratio = figures([ours / theirs for ours, theirs in pairs], ".3f")
            speed = [ours for ours, _ in pairs]
            mfu = "unknown" if peak is None else f"{statistics.median(speed) * case.flops_per_token() / peak:.1%}"
            by_hand = statistics.median(theirs for _, theirs in pairs)
            print(f"{engine:8}{ratio:26}{figures(speed, ',.0f'):34}{mfu:8}{by_hand:,.0f}")


if __name__ == "__main__":
    main()
