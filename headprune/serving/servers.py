"""vLLM and llama.cpp, asked in a process of their own: ``python servers.py ENGINE FOLDER``.

This file imports nothing of headprune, because a server often needs an environment of its own.
The folder has ``request.json``; answers go to ``ENGINE.json`` and ``ENGINE.npz``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens, and the log-probabilities of the first of them: ``[1, vocabulary]``."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import vllm as package

    prompts = request["prompts"]
    engine = package.LLM(
        model=request["folder"],
        tokenizer=request["folder"],
        skip_tokenizer_init=True,
        trust_remote_code=request["trust"],
        dtype="float32",
        enforce_eager=True,
        max_logprobs=-1,  # no limit
        max_model_len=max(map(len, prompts)) + request["new_tokens"],
        max_num_seqs=len(prompts),
    )
    settings = package.SamplingParams(
        temperature=0,
        max_tokens=request["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,  # of every word
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    arrays, tokens = [], []
    for result in engine.generate(given, settings, use_tqdm=False):
        found = result.outputs[0]
        tokens.append(list(found.token_ids))
        first = found.logprobs[0]
        arrays.append(np.array([[first[i].logprob for i in sorted(first)]], dtype=np.float32))
    return {
        "version": package.__version__,
        "what": "log-probabilities",
        "exact": True,
        "arrays": arrays,
        "tokens": tokens,
    }


def llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    """Logits of every token of the prompts, ``[1, tokens, vocabulary]``, and greedy tokens."""
    import llama_cpp as package

    prompts, n_new = request["prompts"], request["new_tokens"]
    engine = package.Llama(
        request["gguf"],
        n_ctx=max(map(len, prompts)) + n_new,
        logits_all=True,
        type_k=0,  # fp32; by default keys and values are rounded to 16 bits
        type_v=0,
        verbose=False,
    )
    arrays, tokens = [], []
    for prompt in prompts:
        engine.reset()
        engine.eval(prompt)
        arrays.append(np.array(engine.scores[None, : len(prompt)], dtype=np.float32))
        new: list[int] = []
        while len(new) < n_new:
            new.append(int(np.argmax(engine.scores[engine.n_tokens - 1])))
            engine.eval(new[-1:])
        tokens.append(new)
    # 0 is fp32 among the types that a GGUF file states.
    exact = engine.metadata.get("general.file_type") == "0"
    return {
        "version": package.__version__,
        "what": "logits",
        "exact": exact,
        "arrays": arrays,
        "tokens": tokens,
    }


def write(place: Path, name: str, answer: dict[str, Any]) -> None:
    """Write an answer, its numbers apart."""
    np.savez(place / f"{name}.npz", *answer.pop("arrays"))
    (place / f"{name}.json").write_text(json.dumps(answer))


def main() -> None:
    """Answer a request."""
    name, place = sys.argv[1], Path(sys.argv[2])
    request = json.loads((place / "request.json").read_text())
    ask = {"vllm": vllm, "llama.cpp": llama_cpp}[name]
    try:
        found = ask(request)
    except Exception as error:  # a server may fail in any way
        found = {"error": f"{type(error).__name__}: {error}", "arrays": []}
    write(place, name, found)


if __name__ == "__main__":
    main()
