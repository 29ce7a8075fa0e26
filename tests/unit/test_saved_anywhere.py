"""Cut models that Transformers, its Trainer and PEFT save: ``hp.from_pretrained`` opens each folder.

Every way of saving is tried with six families, and one fresh process opens all their folders; the
plainest way with every family there is.
"""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import headprune as hp
from headprune.attention.kept_heads import KEPT_HEADS
from headprune.core.errors import CheckpointError, InvalidValue
from headprune.core.heads import HeadMask
from headprune.layouts import registry
from headprune.model.saves import record_of
from headprune.surgery.verify import sample_outputs
from tests.laws.families import FAMILIES as EVERY_FAMILY
from tests.laws.families import model_class
from tests.scripts import benchmark

FORMATS = benchmark("formats")  # its plans: an even one, an uneven one, one with an empty layer
FAMILIES = ["bert", "llama", "gpt2", "vit", "bart", "t5"]
#: Opens every folder of a parent, and writes what the models give beside them.
READER = """
import sys
from pathlib import Path
import torch
import headprune as hp
from headprune.surgery.verify import sample_outputs
for folder in sorted(Path(sys.argv[1]).iterdir()):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    outputs = sample_outputs(hp.from_pretrained(folder / "model"), batch)
    torch.save(outputs, folder / "outputs.pt")
"""


def family(name):
    model, batch = registry.get(name).tiny(0)
    return model.eval(), batch


def assert_same(model, again, batch):
    """Bit for bit, in every output."""
    assert all(map(torch.equal, sample_outputs(model, batch), sample_outputs(again, batch)))


def first_group(site):
    """Keeps all heads of a site but its first group of key/value heads."""
    return {site.name: [head for group in site.groups[1:] for head in group]}


def cut(model, keep):
    sites = hp.find_sites(model, feed_forward=True)
    mask = HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})
    hp.prune_(model, mask, sites=sites)


def cut_uneven(model):
    cut(model, first_group(hp.find_sites(model)[0]))


def cut_twice(model):
    cut_uneven(model)
    cut(model, first_group(hp.find_sites(model)[-1]))


def cut_even(model):
    keep = {}
    for site in hp.find_sites(model):
        keep.update(first_group(site))
    cut(model, keep)


def cut_neurons(model):
    sites = hp.find_sites(model, feed_forward=True)
    cut(model, {s.name: range(0, s.n_query_heads, 2) for s in sites if s.is_feed_forward})


class CutAfterOneStep(hf.TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        if state.global_step == 1:
            cut_uneven(given["model"])


def trained(model, batch, folder, *, resume=False, callback=None):
    """Trains two steps and saves by the Trainer, with its best model or going on from a save."""
    rows = [{k: v[i] for k, v in batch.items()} for i in range(len(next(iter(batch.values()))))]

    def loss(outputs, labels, **kwargs):
        first = next(v for v in outputs.values() if isinstance(v, torch.Tensor) and v.dim())
        return first.float().pow(2).mean()

    class OwnLoss(hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            value = loss(outputs, None)
            return (value, outputs) if return_outputs else value

        def prediction_step(self, model, inputs, *args, **kwargs):
            with torch.no_grad():
                return self.compute_loss(model, inputs), None, None

    def trainer(steps):
        arguments = hf.TrainingArguments(
            str(folder.parent / "runs"),
            max_steps=steps,
            per_device_train_batch_size=2,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            load_best_model_at_end=not (resume or callback),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-3,
        )
        callbacks = [] if callback is None else [callback]
        return OwnLoss(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)

    trainer(1 if resume else 2).train()
    last = trainer(2)
    if resume:
        last.train(resume_from_checkpoint=True)
    last.save_model(str(folder))


def by_peft(model, folder):
    import peft

    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=linear[:2]))
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder)
    return merged


def ways(name):
    """Each way cuts and saves a model; returns the saved one where it is another."""

    def after(cut, save):
        def way(model, batch, folder):
            cut(model)
            return save(model, batch, folder)

        return way

    def plainly(model, batch, folder, **more):
        model.save_pretrained(folder, **more)

    def refitted(model, batch, folder):
        hp.recover_(model, [batch], "lstsq", teacher=family(name)[0])
        model.save_pretrained(folder)

    copied = lambda m: pickle.loads(pickle.dumps(copy.deepcopy(m)))  # noqa: E731
    return {
        "ours": after(cut_uneven, lambda m, b, f: hp.save_pretrained(m, f) and None),
        "uneven": after(cut_uneven, plainly),
        "even": after(cut_even, plainly),
        "neurons": after(cut_neurons, plainly),
        "two cuts": after(cut_twice, plainly),
        "bfloat16": after(cut_uneven, lambda m, b, f: plainly(m.bfloat16(), b, f)),
        "float16": after(cut_uneven, lambda m, b, f: plainly(m.half(), b, f)),
        "a variant": after(cut_uneven, lambda m, b, f: plainly(m, b, f, variant="small")),
        "shards": after(cut_uneven, lambda m, b, f: plainly(m, b, f, max_shard_size="10KB")),
        "copied and pickled": after(cut_uneven, lambda m, b, f: plainly(copied(m), b, f)),
        "least squares": after(cut_uneven, refitted),
        "Trainer, best model": after(cut_uneven, trained),
        "Trainer, resumed": after(cut_even, lambda m, b, f: trained(m, b, f, resume=True)),
        "Trainer, a callback that cuts": lambda m, b, f: trained(
            m, b, f, callback=CutAfterOneStep()
        ),
        "PEFT, merged": after(cut_uneven, lambda m, b, f: by_peft(m, f)),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_way_of_saving_comes_back_bit_for_bit_in_a_fresh_process(tmp_path):
    expected = {}
    for name in FAMILIES:
        for way, save in ways(name).items():
            if way.startswith(("Trainer", "PEFT")) and name not in ("bert", "llama", "t5"):
                continue
            model, batch = family(name)
            place = tmp_path / "saved" / f"{name}, {way}"
            saved = save(model, batch, place / "model")
            model = model if saved is None else saved
            batch = as_dtype(batch, model.dtype)
            expected[place.name] = sample_outputs(model.eval(), batch)
            torch.save(batch, place / "batch.pt")
    subprocess.run([sys.executable, "-c", READER, str(tmp_path / "saved")], check=True)
    for way, outputs in expected.items():
        again = torch.load(tmp_path / "saved" / way / "outputs.pt", weights_only=False)
        assert all(map(torch.equal, outputs, again)), way


def as_dtype(batch, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", [FORMATS.uneven, FORMATS.uniform, FORMATS.one_empty])
def test_every_family_comes_back_bit_for_bit(plan, tmp_path):
    ours = [pair for pair in EVERY_FAMILY if model_class(*pair) is not None]
    assert len(ours) > 60
    for layout, name in ours:
        model, batch = registry.get(layout).tiny(0, name)
        sites = hp.find_sites(model.eval())
        hp.prune_(model, plan(sites), sites=sites)
        model.save_pretrained(tmp_path / name)
        again = hp.from_pretrained(tmp_path / name)
        outputs = sample_outputs(model, batch), sample_outputs(again, batch)
        assert all(map(torch.equal, *outputs)), name
        assert [s.heads for s in hp.find_sites(again)] == [s.heads for s in hp.find_sites(model)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_their_types(dtype, tmp_path):
    model, _ = family("t5")
    cut_uneven(model)
    # Transformers reads "wo" of T5 as float32 in a float16 model, and norms in the model's type.
    model.to(dtype).get_submodule("encoder.final_layer_norm").float()
    model.save_pretrained(tmp_path)
    again = hp.from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_records_without_types_open(tmp_path):
    model, batch = family("t5")
    cut_uneven(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("dtype", "dtypes", "variant"):
        del config["headprune"][key]  # as an earlier version wrote it
    path.write_text(json.dumps(config))
    again = hp.from_pretrained(tmp_path)
    assert_same(model, again, batch)


#: Saves cut models in a process that cut none.
RECEIVER = """
import sys, torch
torch.load(sys.argv[1], weights_only=False).save_pretrained(sys.argv[2])
"""


def test_a_process_that_did_not_cut_says_what_was_cut(tmp_path):
    model, batch = family("llama")
    cut_uneven(model)
    torch.save(model, tmp_path / "model.pt")
    paths = [str(tmp_path / "model.pt"), str(tmp_path / "model")]
    subprocess.run([sys.executable, "-c", RECEIVER, *paths], check=True)
    again = hp.from_pretrained(tmp_path / "model")
    assert_same(model, again, batch)


def test_an_even_cut_opens_in_plain_transformers_with_equal_outputs(tmp_path):
    model, batch = family("llama")
    cut_even(model)
    model.save_pretrained(tmp_path)
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same(model, plain, batch)
    cut_uneven(plain)  # a second cut counts from the small model
    for number, save in enumerate((plain.save_pretrained, lambda f: hp.save_pretrained(plain, f))):
        save(tmp_path / str(number))
        again = hp.from_pretrained(tmp_path / str(number))
        assert_same(plain, again, batch)
        assert not hasattr(again.config, "headprune")


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_plain_transformers_refuses_an_uneven_cut_and_names_headprune(name, tmp_path):
    model, _ = family(name)
    cut_uneven(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"headprune\.from_pretrained"):
        type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_a_whole_model_is_saved_as_before(tmp_path):
    cut, _ = family("bert")
    model, _ = family("bert")
    model.save_pretrained(tmp_path / "before")
    cut_uneven(cut)  # from now on this process describes what it saves
    model.save_pretrained(tmp_path / "after")
    for name in ("config.json", "model.safetensors"):
        before, after = tmp_path / "before" / name, tmp_path / "after" / name
        assert before.read_bytes() == after.read_bytes()


@pytest.mark.parametrize(
    ("format", "name"),
    [("transformers", "llama"), ("transformers", "vit")]
    + [("remote-code", name) for name in ("bert", "llama", "bart")],
)
def test_folders_for_others_open_here_too(format, name, tmp_path):
    model, batch = family(name)
    (cut_even if format == "transformers" else cut_uneven)(model)
    hp.save_pretrained(model, tmp_path, format=format, example=batch)
    again = hp.from_pretrained(tmp_path)
    assert_same(model, again, batch)
    assert [s.heads for s in hp.find_sites(again)] == [s.heads for s in hp.find_sites(model)]


def test_a_second_cut_leaves_no_counts_of_the_first_for_vllm(tmp_path):
    model, batch = family("llama")
    cut_uneven(model)
    hp.save_pretrained(model, tmp_path / "remote", format="remote-code", example=batch)
    assert "per_layer_config" in json.loads((tmp_path / "remote" / "config.json").read_text())
    again = hp.from_pretrained(tmp_path / "remote")
    again.save_pretrained(tmp_path / "plain")
    assert "per_layer_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def orphan(folder, name="llama"):
    """A folder of a cut and refitted model as it was before saves were described."""
    model, batch = registry.get("llama").tiny(0, name)
    model.eval()
    config = copy.deepcopy(model.config)
    whole = copy.deepcopy(model)
    cut_uneven(model)
    hp.recover_(model, [batch], "lstsq", teacher=whole)
    model.save_pretrained(folder)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return model, batch, HeadMask.full(hp.find_sites(model))


@pytest.mark.parametrize("name", ["llama", "llava"])  # llava's tensors have other names on disk
def test_a_plan_opens_a_folder_that_does_not_say_what_was_cut(name, tmp_path):
    model, batch, mask = orphan(tmp_path, name)
    with pytest.raises(CheckpointError, match="plan="):
        hp.from_pretrained(tmp_path)
    again = hp.from_pretrained(tmp_path, plan=mask)
    assert_same(model, again, batch)


def test_a_plan_of_another_cut_is_refused(tmp_path):
    _, _, mask = orphan(tmp_path)
    sites = hp.find_sites(family("llama")[0])
    other = HeadMask.from_keep(first_group(sites[1]), {s.name: s.n_query_heads for s in sites})
    with pytest.raises(CheckpointError, match="of another shape"):
        hp.from_pretrained(tmp_path, plan=other)
    with pytest.raises(InvalidValue, match="PruningPlan or HeadMask"):
        hp.from_pretrained(tmp_path, plan=[mask])


@pytest.mark.parametrize("ours", [True, False])
def test_a_plan_for_a_folder_that_says_what_was_cut_is_refused(ours, tmp_path):
    model, _ = family("bert")
    cut_uneven(model)
    if ours:
        hp.save_pretrained(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    with pytest.raises(InvalidValue, match="left out"):
        hp.from_pretrained(tmp_path, plan=HeadMask.full(hp.find_sites(model)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["headprune"].update(mask=3), "a record that we can read"),
        (lambda c: c["headprune"]["mask"]["rows"][0].update(site="x"), "4 heads at 'x'"),
        (lambda c: c["headprune"]["mask"]["rows"][0].update(kept=[1]), "of another shape"),
        (lambda c: c["headprune"].update(dtype="no type"), "no type"),
        (lambda c: c["headprune"].update(buffers={"no.table": "float16"}), "model's tables"),
        (lambda c: c["headprune"].update(config={"model_type.x": 1}), "this configuration"),
        (lambda c: c["headprune"].update(layouts=[{"slabs": 3}]), "a stored layout"),
        (lambda c: c.update(architectures=["Mine"]), "class of Transformers"),
        (lambda c: c.update(num_hidden_layers="two"), "a valid configuration"),
    ],
)
def test_a_damaged_record_is_refused(change, match, tmp_path):
    model, _ = family("bert")
    cut_uneven(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=match):
        hp.from_pretrained(tmp_path)


@pytest.mark.parametrize("format", ["headprune", "remote-code"])
def test_a_save_over_a_folder_of_ours_takes_its_place(format, tmp_path):
    model, batch = family("bert")
    cut_uneven(model)
    (tmp_path / "README.md").write_text("My words.\n")
    hp.save_pretrained(model, tmp_path, format=format)
    hp.prune_heads_(model, {1: [3]})
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().strip() == "My words."
    assert not [*tmp_path.glob("headprune.json"), *tmp_path.glob("*.py")]
    again = hp.from_pretrained(tmp_path)
    assert_same(model, again, batch)


def first_sites(model):
    """The first attention, and the first feed-forward."""
    sites = hp.find_sites(model, feed_forward=True)
    first = [next(s for s in sites if s.is_feed_forward is neurons) for neurons in (False, True)]
    return sites, *first


@pytest.mark.parametrize("neurons_first", [True, False])
@pytest.mark.parametrize("name", ["bert", "bart"])
def test_a_layer_may_lose_neurons_and_all_heads_in_any_order(name, neurons_first, tmp_path):
    """The module of this feed-forward is the layer, which holds the attention."""
    model, batch = family(name)
    sites, attention, neurons = first_sites(model)
    kept = {site.name: site.heads for site in sites}
    steps = [(neurons.name, neurons.heads[::2]), (attention.name, ())]
    for site, heads in steps if neurons_first else steps[::-1]:
        kept[site] = heads
        cut(model, kept)
    model.save_pretrained(tmp_path / "own")
    hp.save_pretrained(model, tmp_path / "code", format="remote-code")
    for folder in ("own", "code"):
        assert_same(model, hp.from_pretrained(tmp_path / folder), batch)


def test_a_folder_without_the_buffer_of_kept_heads_opens(tmp_path):
    """As models with offloaded buffers are saved: the record has the heads, too."""
    model, batch = family("mpnet")
    cut_uneven(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stored = [name for name in tensors if name.endswith(KEPT_HEADS)]
    assert stored
    for name in stored:
        del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    again = hp.from_pretrained(tmp_path)
    assert_same(model, again, batch)
    assert stored == [name for name in again.state_dict() if name.endswith(KEPT_HEADS)]


def test_folded_heads_are_not_taken_for_neurons():
    whole, batch = family("bert")
    model = copy.deepcopy(whole)
    sites, attention, neurons = first_sites(model)
    kept = {site.name: site.heads for site in sites}
    kept[attention.name] = attention.heads[1:]
    cut(model, kept)
    hp.recover_(model, [batch], "mean_fold", teacher=whole)
    cut(model, {**kept, neurons.name: neurons.heads[1:]})
    assert dict(record_of(model, None).folded) == {attention.name: attention.heads[:1]}


def test_a_setting_that_no_folder_may_have_is_refused_before_anything_is_written(tmp_path):
    model, _ = family("llama")
    model.config.num_training_steps = 100_000
    with pytest.raises(
        CheckpointError, match=r"model\.config: num_training_steps.*Remove it from model"
    ):
        hp.save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
