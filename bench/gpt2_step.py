"""What a framework adds to a step of a small GPT-2, against a hand-written loop in the same process.

    .venv-bench/bin/python bench/gpt2_step.py               # 9 pairs of 20 steps; part of `make bench`
    .venv-bench/bin/python bench/gpt2_step.py --systems kernel,hf --pairs 15 --steps 40

transformers' GPT-2 with 4 layers, width 128, 4 heads, 256 tokens, no dropout; batches of 8 times 128 tokens, AdamW, one
thread. Bare: no bar, no logs. The two of a pair run one after the other; the ratio is of CPU time. All weights must end
bit-equal to the loop's.
"""

import argparse
import json

import torch
from systems import RAW, Task, chosen, compare, versions
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_task(steps: int) -> Task:
    config = GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_positions=128,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = GPT2LMHeadModel(config)
        net.accepts_loss_kwargs = (
            False  # else HF's Trainer asks for a sum over counted labels: other rounding, other weights
        )
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3)

    random = torch.Generator().manual_seed(1)
    tokens = [torch.randint(256, (8, 128), generator=random) for _ in range(steps)]
    return Task(make, [{"input_ids": ids, "labels": ids} for ids in tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs for each figure, after one to warm up")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--systems", help="some of kernel,ignite,fabric,accelerate,lightning,hf; the default is all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    systems = chosen(arguments.systems)
    results = compare(gpt2_task(arguments.steps), {system.name: system.fit for system in systems}, arguments.pairs)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{arguments.pairs} pairs of {arguments.steps} steps, median [least, greatest]; {versions([RAW, *systems])}")
    print(f"{'':12}{'ratio, CPU':26}{'ratio, wall':26}ms by hand, CPU")
    for name, row in results.items():
        weights = "" if row["bit_equal"] else "   WEIGHTS DIFFER FROM THE LOOP'S"
        milliseconds = row["us_raw_cpu"].median / 1000
        print(f"{name:12}{row['ratio_cpu']!s:26}{row['ratio_wall']!s:26}{milliseconds:.1f}{weights}")


if __name__ == "__main__":
    main()
