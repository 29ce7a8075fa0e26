"""Ask one engine for outputs and greedy tokens: ``python -m headprune.serving.asking NAME FOLDER``.

The folder has ``request.json`` and ``example.safetensors``; answers go to ``NAME.json`` and
``NAME.npz``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headprune.core.errors import error_text
from headprune.serving.engines import ENGINES, Forward, Inputs
from headprune.serving.opening import reference, with_transformers
from headprune.serving.servers import write

#: From the tokens ``[1, tokens]`` that are new to the logits of the last one, ``[vocabulary]``.
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Answer:
    """What an engine answers.

    Args:
        arrays: Outputs of the example; of a decoder, logits ``[1, tokens, vocabulary]`` of each
            prompt.
        tokens: Greedy tokens of each prompt.
        gaps: For each of them, how far the best logit was above the second.
    """

    arrays: list[Tensor]
    tokens: list[list[int]]
    gaps: list[list[float]]


@torch.no_grad()
def ask(
    forward: Forward,
    example: Inputs,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    cached: nn.Module | None = None,
) -> Answer:
    """Ask for outputs and greedy tokens.

    Args:
        forward: The engine's forward pass.
        example: Its inputs, where there are no prompts.
        prompts: Tokens, for a decoder.
        new_tokens: Greedy tokens of each prompt, whatever their meaning: none ends it.
        cached: A model to generate with its KV cache; by default every step reads all tokens.
    """
    if not prompts:
        return Answer(forward(example), [], [])
    arrays, tokens, gaps = [], [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        arrays.append(forward(_inputs(ids))[0])
        step = _without_cache(forward) if cached is None else _with_cache(cached)
        new: list[int] = []
        of_prompt: list[float] = []
        while len(new) < new_tokens:
            best = step(ids).topk(2)  # logits [vocabulary]; the gap shows how close a call was
            new.append(int(best.indices[0]))
            of_prompt.append(float(best.values[0] - best.values[1]))
            ids = torch.tensor([new[-1:]])  # [1, 1]: a step gets what the last one has not seen
        tokens.append(new)
        gaps.append(of_prompt)
    return Answer(arrays, tokens, gaps)


def _inputs(ids: Tensor) -> Inputs:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _without_cache(forward: Forward) -> Step:
    read = torch.empty(1, 0, dtype=torch.long)

    def step(ids: Tensor) -> Tensor:
        nonlocal read
        read = torch.cat([read, ids], 1)
        return forward(_inputs(read))[0][0, -1]  # [vocabulary]

    return step


def _with_cache(model: Any) -> Step:
    cache = None

    def step(ids: Tensor) -> Tensor:
        nonlocal cache
        result = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        logits: Tensor = result.logits[0, -1]
        return logits

    return step


def answer(name: str, place: Path) -> dict[str, Any]:
    """Open a folder's model, run it in an engine and return what it answers.

    Args:
        name: A name of ``ENGINES``.
        place: A folder with the request.
    """
    engine = ENGINES[name]
    assert engine.prepare is not None  # the others are asked by `servers.py`
    request = json.loads((place / "request.json").read_text())
    folder, trust = Path(request["folder"]), request["trust"]
    example = load_file(place / "example.safetensors")
    open_folder = with_transformers if name == "transformers" else reference
    model = open_folder(folder, trust)
    forward = engine.prepare(model, example, place)
    cached = model if name in ("headprune", "transformers") else None
    found = ask(forward, example, request["prompts"], request["new_tokens"], cached)
    return {
        "version": importlib.import_module(engine.packages[0]).__version__,
        "what": "logits" if request["prompts"] else "outputs",
        "exact": engine.exact,
        "arrays": [t.float().numpy() for t in found.arrays],
        "tokens": found.tokens,
    }


def main() -> None:
    """Answer the request of the command line."""
    name, place = sys.argv[1], Path(sys.argv[2])
    try:
        found = answer(name, place)
    except Exception as error:  # an engine may fail in any way
        found = {"error": error_text(error), "arrays": []}
    write(place, name, found)


if __name__ == "__main__":
    main()
