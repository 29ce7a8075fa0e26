"""The same task learned from data; as a script it trains the model and writes the weights that the
tests load.

    python -m tests.known.trained

Trained on the task alone, several heads of layer 1 learn the same and stand in for each other, so
that no one of them is necessary. So two more terms are minimised. A price on the size of heads,
``sum_h |W_V,h| |W_O,h|``, leaves fewer that do the work. And the first token after BOS is to be
read off the residual stream, through a matrix that is thrown away afterwards: a head that learns
this moves activations and no answer. Which heads turn out necessary nobody says:
``ablation.necessary`` measures it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from headprune.core.files import atomic_path
from tests.known.induction import LENGTH, N_TOKENS, AttentionOnly, accuracy, examples, loss

WEIGHTS = Path(__file__).with_name("trained.safetensors")
SEED, STEPS, BATCH, RATE = 0, 800, 64, 3e-3
FIRST, SIZE = 0.3, 3e-3  # weights of the two terms
WIDTH = 48


def untrained() -> AttentionOnly:
    """The model as training finds it, drawn from torch's random state: 2 layers of 4 heads, 21,312
    parameters."""
    return AttentionOnly(WIDTH, n_heads=(4, 4), head_dim=12)


def trained() -> AttentionOnly:
    """The model with the committed weights, fp32, in evaluation mode."""
    model = untrained()
    model.load_state_dict(load_file(WEIGHTS))
    return model.eval()


def train(seed: int = SEED, steps: int = STEPS, progress: bool = False) -> AttentionOnly:
    """Adam on fresh examples at every step, with a rate that warms up and then falls to zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, first = untrained(), nn.Linear(WIDTH, N_TOKENS)
    optimizer = torch.optim.Adam([*model.parameters(), *first.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps, pct_start=0.05
    )
    for step in range(steps):
        # Measurements have seeds below 10 ** 6.
        batch = examples(BATCH, seed=10**6 * (seed + 1) + step)
        mean = loss(model, batch).mean()
        total = mean + FIRST * _first_token(model, first, batch["input_ids"]) + SIZE * _sizes(model)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        schedule.step()
        if progress and (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: loss {mean.item():.4f}, accuracy {accuracy(model, batch):.3f}",
                flush=True,
            )
    return model.eval()


def _first_token(model: AttentionOnly, first: nn.Linear, input_ids: Tensor) -> Tensor:
    wanted = input_ids[:, 1:2].expand(-1, LENGTH - 1)
    return functional.cross_entropy(first(model.residual(input_ids)[:, 1:]).transpose(1, 2), wanted)


def _sizes(model: AttentionOnly) -> Tensor:
    total = torch.zeros(())
    for layer in model.layers:
        value = layer.W_v.weight.unflatten(0, (layer.n_heads, -1)).flatten(1).norm(dim=1)
        output = (
            layer.W_o.weight.unflatten(1, (layer.n_heads, -1))
            .transpose(0, 1)
            .flatten(1)
            .norm(dim=1)
        )
        total = total + value @ output
    return total


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = train(steps=args.steps, progress=True)
    made = {"seed": str(SEED), "steps": str(args.steps), "torch": torch.__version__}
    with atomic_path(args.out) as path:
        save_file(model.state_dict(), path, made)


if __name__ == "__main__":
    main()
