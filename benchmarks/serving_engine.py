"""Answers of one serving engine for folders of models; run in that engine's environment.

    python serving_engine.py ENGINE FOLDER ...

Each folder has ``prompt.json``, a list of token ids. What the engine decodes greedily is written to
``ENGINE.npz``: ``tokens`` of each step, and ``logprobs`` [steps, vocabulary]. An error is written to
``ENGINE.error``. Needs NumPy and the engine; headprune is not imported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 32
_Answer = tuple[list[int], Any]


def main() -> None:
    engine, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        prompt = json.loads((folder / "prompt.json").read_text())
        try:
            tokens, logits = ENGINES[engine](folder, prompt)
        except Exception as error:  # an engine may fail in any way, and that is a result
            traceback.print_exc()
            text = " ".join(str(error).split())[:300]
            (folder / f"{engine}.error").write_text(f"{type(error).__name__}: {text}")
            continue
        np.savez(folder / f"{engine}.npz", tokens=np.array(tokens), logprobs=_log_softmax(logits))


def _log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def transformers(folder: Path, prompt: list[int]) -> _Answer:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    logits = torch.stack([step[0] for step in made.logits])
    return made.sequences[0, len(prompt) :].tolist(), logits.float().numpy()


def vllm(folder: Path, prompt: list[int]) -> _Answer:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    model = LLM(
        str(folder),
        trust_remote_code=True,
        skip_tokenizer_init=True,
        model_impl="transformers",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        enforce_eager=True,
        max_logprobs=-1,
    )
    wanted = SamplingParams(
        temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1, detokenize=False
    )
    answer = model.generate([{"prompt_token_ids": prompt}], wanted)[0].outputs[0]
    rows = np.zeros((len(answer.logprobs), len(answer.logprobs[0])))
    for number, step in enumerate(answer.logprobs):
        for token, found in step.items():
            rows[number, token] = found.logprob
    return list(answer.token_ids), rows


def llama_cpp(folder: Path, prompt: list[int]) -> _Answer:
    import ctypes

    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(
        str(folder / "model.gguf").encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = 64
    settings.n_threads = settings.n_threads_batch = 1
    # By default the cache has 16-bit floats, and flash attention computes with them.
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = model and llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp does not load the file, see its log")
    n_rows = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    given, tokens, rows = prompt, [], []
    for _ in range(STEPS):
        ids = (llama_cpp.llama_token * len(given))(*given)
        batch = llama_cpp.llama_batch_get_one(ids, len(given))
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        numbers = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        rows.append(np.ctypeslib.as_array(numbers, (n_rows,)).copy())
        given = [int(rows[-1].argmax())]
        tokens += given
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return tokens, np.array(rows)


ENGINES = {"transformers": transformers, "vllm": vllm, "llama_cpp": llama_cpp}

if __name__ == "__main__":
    main()
