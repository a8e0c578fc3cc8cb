"""Train with transformers' Trainer, in eager DDP and through ddpopt, with accumulation and clipping.

torchrun --nproc-per-node 2 examples/transformers_trainer.py [inductor]
"""

import logging
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ddpopt


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(500, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(backend: str | None, folder: str) -> list[Tensor]:
    """Train for two epochs, in eager DDP if there is no backend; return the parameters."""
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=2, max_grad_norm=1.0, eval_strategy="epoch", save_strategy="no", report_to=[],
        disable_tqdm=True, ddp_bucket_cap_mb=1, ddp_find_unused_parameters=False,
    )  # fmt: skip
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=500, n_positions=16, use_cache=False)
    model = GPT2LMHeadModel(config)
    if backend:
        model.compile(backend=ddpopt.DdpoptBackend(backend))
    Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens()).train()
    return [parameter.detach() for parameter in model.parameters()]


def main(backend: str = "aot_eager") -> bool:
    """Train twice and compare: aot_eager is bitwise equal, inductor up to rounding."""
    logging.basicConfig()
    logging.getLogger("ddpopt").setLevel(logging.INFO)
    torch._inductor.config.fallback_random = True  # dropout draws eager's numbers
    atol = 0.0 if backend == "aot_eager" else 2e-4
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(train(None, folder), train(backend, folder), strict=True)
        equal = all(torch.allclose(eager, ours, rtol=0, atol=atol) for eager, ours in pairs)
    if dist.get_rank() == 0:
        print(f"equal to eager: {'yes' if equal else 'no'}")
    dist.destroy_process_group()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
