"""The page on lm-evaluation-harness: a local task, evaluated on a cut model."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headprune as hp
from tests.documents import DOCS, blocks

WORDS = ["<pad>", "<eos>", "<unk>", "the", "film", "plot", "was", "and", "good", "bad", "dull"]


def small(folder):
    """A Llama whose layers keep unlike numbers of heads, saved with a tokenizer of words."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=len(WORDS), **sizes, **heads, initializer_range=0.3)
    model = LlamaForCausalLM(config).eval()
    hp.prune_(model, [[1, 1, 0, 0], [1, 1, 1, 1]])
    hp.save_pretrained(model, folder, processor=tokenizer)
    return model, tokenizer


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the harness and its packages
def test_the_harness_reads_the_cut_models_own_probabilities(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.chdir(tmp_path)
    model, tokenizer = small(tmp_path / "small")
    rows = []
    for text in ("the film was", "the plot and the film"):
        rows += [{"text": text, "choices": ["good", "bad", "dull"], "answer": i} for i in range(2)]
    (tmp_path / "films.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = [b for b in blocks(DOCS / "evaluation.md") if b.language == "python"]
    page = {}
    exec(compile(block.text, "evaluation.md", "exec"), page)
    samples = page["results"]["samples"]["films"]
    assert len(samples) == len(rows)
    n_right = 0
    for sample in samples:
        row = rows[sample["doc_id"]]
        ids = tokenizer(row["text"], return_tensors="pt")["input_ids"]
        choices = tokenizer.convert_tokens_to_ids(row["choices"])
        with torch.no_grad():
            wanted = model(input_ids=ids).logits[0, -1].log_softmax(-1)[choices]
        found = torch.tensor([float(answer[0]) for answer in sample["filtered_resps"]])
        assert_close(found, wanted)
        n_right += int(wanted.argmax()) == row["answer"]
    assert page["results"]["results"]["films"]["acc,none"] == n_right / len(rows)
