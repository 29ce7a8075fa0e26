"""recover_ and mean_fold: equal to a mean ablation of the teacher, over every layout, in fp64."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InvalidValue, PlanMismatch, UnknownName, UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.layouts import registry as layouts
from headprune.model.running import call, outputs
from headprune.model.sites import bind, find_sites
from headprune.recovery import MeanFold, RecoveryReport, registry
from headprune.surgery.prune import prune_
from tests.laws.support import as_double

EXACT = {"rtol": 0, "atol": 1e-10}


def build(name, seed=0):
    """A tiny fp64 model in evaluation mode and two unlike batches, of 3 examples and of 1."""
    model, batch = layouts.get(name).tiny(seed)
    second = {k: v[:1] for k, v in layouts.get(name).tiny(seed + 1)[1].items()}
    return model.double().eval(), [as_double(batch), as_double(second)]


def some_heads(model, whole=None):
    """A mask without the second unit of every site, and without any head of site ``whole``."""
    sites = find_sites(model)
    keep = {
        s.name: [h for h in s.heads if h not in s.units[1] and i != whole]
        for i, s in enumerate(sites)
    }
    return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


def keep(model, heads):
    counts = {s.name: s.n_query_heads for s in find_sites(model)}
    return HeadMask.from_keep(dict.fromkeys(counts, heads), counts)


def cut(teacher, mask=None, **more):
    model = copy.deepcopy(teacher)
    prune_(model, mask or some_heads(model), **more)
    return model


def padding(batch, shape):
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if isinstance(batch, dict) and "valid_lens" in batch:
        mask = torch.arange(shape[1]) < batch["valid_lens"][:, None]
    if mask is None or mask.shape != shape:
        return torch.ones(shape, dtype=torch.bool)
    return mask.bool()


def ablated(teacher, mask, batches):
    """Oracle: the teacher with hooks that put the mean in the place of each removed head's
    output."""
    teacher = copy.deepcopy(teacher)
    seen = {}
    handles = []
    for bound in bind(teacher):
        note = seen.setdefault(bound.site.name, [])
        handles.append(
            bound.gate.register_forward_pre_hook(lambda _, args, note=note: note.append(args[0]))
        )
    for batch in batches:
        start = {name: len(note) for name, note in seen.items()}
        with torch.no_grad():
            call(teacher, batch)
        for name, note in seen.items():
            note[start[name] :] = [x[padding(batch, x.shape[:2])] for x in note[start[name] :]]
    for handle in handles:
        handle.remove()
    for bound in bind(teacher):
        mean = torch.cat(seen[bound.site.name]).mean(0)
        gone = [i for i, h in enumerate(bound.site.heads) if h not in mask.kept(bound.site.name)]
        width = bound.site.value_dim

        def replace(_, args, mean=mean, gone=gone, width=width):
            x = args[0].clone()
            for head in gone:
                x[..., head * width : (head + 1) * width] = mean[head * width : (head + 1) * width]
            return (x,)

        bound.gate.register_forward_pre_hook(replace)
    return teacher


def run(model, batch):
    with torch.no_grad():
        return outputs(call(model, batch))


def same(model, oracle, batch):
    torch.testing.assert_close(run(model, batch), run(oracle, batch), **EXACT)


def test_the_registry_holds_the_methods():
    assert registry.names() == ["finetune", "head_rescale", "lstsq", "mean_fold"]
    assert hp.recovery.MeanFold is registry.get("mean_fold") is MeanFold
    with pytest.raises(AttributeError, match="Did you mean 'MeanFold'"):
        _ = hp.recovery.MeanFolds


@pytest.mark.parametrize(
    ("name", "whole"),
    [("bert", None), ("gpt2", 0), ("llama", 0), ("multi_head_attention", None), ("vit", 0)],
)
def test_mean_fold_equals_the_teacher_with_mean_ablated_heads(name, whole):
    teacher, batches = build(name)
    mask = some_heads(teacher, whole)
    model = cut(teacher, mask)
    before = [run(model, b) for b in batches]
    report = hp.recover_(model, batches, "mean_fold", teacher)
    oracle = ablated(teacher, mask, batches)
    for batch, old in zip(batches, before, strict=True):
        got = run(model, batch)
        torch.testing.assert_close(got, run(oracle, batch), **EXACT)
        assert max((a - b).abs().max() for a, b in zip(got, old, strict=True)) > 1e-4
    assert report.metrics["heads"] == mask.n_heads - mask.n_kept
    assert report.n_examples == 4
    assert len(report.changed) == len(mask.rows)
    assert set(report.changed) <= {n for n, _ in model.named_parameters()}


def test_narrow_models_are_folded_in_wide_arithmetic():
    """In bf16 a running sum stalls once it is 256 times as large as what is added."""
    wide = nn.Sequential(hp.MultiHeadAttention(8, 4)).double()
    batches = [1 + 0.1 * torch.randn(1, 2, 8, dtype=torch.float64) for _ in range(600)]
    biases = []
    for dtype in (torch.float64, torch.bfloat16):
        teacher = copy.deepcopy(wide).to(dtype)
        model = cut(teacher, keep(teacher, []))
        hp.recover_(model, [b.to(dtype) for b in batches], MeanFold(measure=False), teacher)
        biases.append(model[0].W_o.bias.detach())
    assert biases[1].dtype is torch.bfloat16
    # bf16 keeps 8 bits, and the teacher's weights and activations carry that error too
    near = 0.02 * float(biases[0].abs().max())
    torch.testing.assert_close(biases[1].double(), biases[0], rtol=0, atol=near)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        attention = hp.MultiHeadAttention(8, 4)
        self.layers = nn.ModuleList([attention, attention])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_shared_module_is_folded_once_over_all_its_runs():
    teacher, batches = Shared().double(), [torch.randn(2, 3, 8, dtype=torch.float64)]
    mask = some_heads(teacher)
    model = cut(teacher, mask)
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert report.changed == ("layers.0.W_o.bias",)
    same(model, ablated(teacher, mask, batches), batches[0])
    # the same, where both names are given as sites
    (site,) = find_sites(teacher)
    twice = [site, dataclasses.replace(site, name="layers.1", shared_with=())]
    other = cut(teacher, mask)
    report = hp.recover_(other, batches, "mean_fold", teacher=teacher, sites=twice)
    assert (report.changed, report.metrics["heads"]) == (("layers.0.W_o.bias",), 1)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **EXACT)


def test_a_bias_that_two_projections_share_is_refused():
    teacher = nn.Sequential(hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4))
    teacher[1].W_o.bias = teacher[0].W_o.bias
    model = cut(teacher)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedModel, match=r"0\.W_o\.bias: must be used by one projection only.*'1\.W_o'"
    ):
        hp.recover_(model, [torch.randn(2, 3, 8)], teacher=teacher)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_cut_fold_cut_fold_folds_every_head_once():
    teacher, batches = build("gpt2")
    both = keep(teacher, [0, 3])
    model = cut(teacher, keep(teacher, [0, 2, 3]))
    hp.recover_(model, batches, "mean_fold", teacher=teacher)
    prune_(model, both)
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert report.metrics["heads"] == 3
    assert "3 removed heads had been folded before" in str(report)
    oracle = ablated(teacher, both, batches)
    same(model, oracle, batches[0])
    again = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert (again.changed, again.metrics["heads"]) == ((), 0)
    assert "Nothing to fold" in again.notes[-1]
    same(model, oracle, batches[0])


def test_a_teacher_that_was_cut_itself_gives_the_heads_that_it_still_has():
    teacher, batches = build("bert")
    prune_(teacher, keep(teacher, [1, 2, 3]))
    mask = keep(teacher, [1, 3])
    model = cut(teacher, mask)
    assert hp.recover_(model, batches, "mean_fold", teacher=teacher).metrics["heads"] == 3
    same(model, ablated(teacher, mask, batches), batches[0])


def test_sites_of_a_layout_of_your_own_reach_teacher_and_model():
    layout = dataclasses.replace(layouts.get("multi_head_attention"), name="mine")
    teacher = nn.Sequential(hp.MultiHeadAttention(8, 4))
    sites = find_sites(teacher, [layout])
    model = cut(teacher, sites=sites)
    report = hp.recover_(model, [torch.randn(2, 3, 8)], "mean_fold", teacher, sites=sites)
    assert report.changed == ("0.W_o.bias",)


def test_a_compiled_model_and_teacher_are_looked_at_from_inside():
    teacher, batches = build("bert")
    mask = some_heads(teacher)
    model = cut(teacher, mask)
    compiled = [torch.compile(one, backend="eager") for one in (model, teacher)]
    report = hp.recover_(compiled[0], batches, "mean_fold", teacher=compiled[1])
    assert len(report.changed) == 3
    same(model, ablated(teacher, mask, batches), batches[0])


def test_errors_are_reported_where_the_batches_can_be_read_again():
    teacher, batches = build("bert")
    reports, models = [], []
    for given, method in (
        (batches, MeanFold()),
        (iter(batches), MeanFold()),
        (iter(batches), MeanFold(measure=False)),
    ):
        models.append(cut(teacher))
        reports.append(hp.recover_(models[-1], given, method, teacher))
    for model in models[1:]:
        torch.testing.assert_close(model.state_dict(), models[0].state_dict(), rtol=0, atol=0)
    names = [name.removesuffix(".bias") for name in reports[0].changed]
    assert list(reports[0].metrics["errors"]) == names
    assert reports[0].metrics["error_after"] < reports[0].metrics["error_before"]
    assert not any("errors" in report.metrics for report in reports[1:])
    assert reports[1].notes == ("No errors are reported: the batches can be read only once.",)
    assert reports[2].notes == ()
    assert RecoveryReport.from_json(reports[0].to_json()) == reports[0]
    assert str(reports[0]).startswith("mean_fold: 3 parameters changed, 4 examples, ")


def pruned_pair():
    teacher, batches = build("bert")
    return cut(teacher), teacher, batches


def test_the_teacher_must_be_given_and_be_another_model():
    model, teacher, batches = pruned_pair()
    for wrong, words in (
        (None, "unpruned original, which mean_fold needs, got None"),
        (model, "got the model itself"),
        (torch.compile(model, backend="eager"), "got the model itself"),
    ):
        with pytest.raises(InvalidValue, match=f"teacher: must be .*{words}"):
            hp.recover_(model, batches, "mean_fold", teacher=wrong)
    teacher.classifier = model.classifier
    with pytest.raises(InvalidValue, match="shares trainable parameters"):
        hp.recover_(model, batches, "mean_fold", teacher=teacher)


def test_a_teacher_of_another_structure_is_refused():
    model, teacher, batches = pruned_pair()
    for sites in (None, find_sites(model)):
        with pytest.raises(PlanMismatch, match="the model that the pruned one was cut from"):
            hp.recover_(model, batches, "mean_fold", teacher=build("gpt2")[0], sites=sites)
    with pytest.raises(PlanMismatch, match=r"one without heads \[1\].*swapped\?"):
        hp.recover_(teacher, batches, teacher=model)
    teacher.bert.encoder.layer = teacher.bert.encoder.layer[:2]
    with pytest.raises(PlanMismatch, match=r"8 heads at 2 sites against .* with 12 heads"):
        hp.recover_(model, batches, "mean_fold", teacher=teacher)


def test_bad_arguments_are_refused_and_the_model_is_as_it_was():
    model, teacher, batches = pruned_pair()
    before = copy.deepcopy(model.state_dict())
    blank = {**batches[0], "attention_mask": torch.zeros(3, 7, dtype=torch.long)}
    beyond = [batches[0], {"input_ids": torch.full((1, 3), 10_000)}]
    for one, given, method, error, words in (
        (model, batches, "mean_folds", UnknownName, "Did you mean 'mean_fold'"),
        (model, batches, MeanFold, InvalidValue, "Call it, to configure it"),
        ("bert", batches, "mean_fold", InvalidValue, r"must be a torch\.nn\.Module"),
        (model, [], "mean_fold", InvalidValue, "batches: must be at least one batch"),
        (model, [blank], "mean_fold", InvalidValue, "with a token that is no padding"),
        (model, beyond, "mean_fold", InvalidValue, "batch 1"),
    ):
        with pytest.raises(error, match=words):
            hp.recover_(one, given, method, teacher)
    nn.init.constant_(teacher.bert.encoder.layer[0].attention.self.value.bias, float("nan"))
    words = r"mean head output at bert\.encoder\.layer\.0\.attention: must be finite"
    with pytest.raises(InvalidValue, match=words):
        hp.recover_(model, batches, "mean_fold", teacher)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(m._forward_pre_hooks for m in teacher.modules())
    assert all(p.requires_grad for p in teacher.parameters())


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("kind", [list, iter])
def test_a_projection_that_never_runs_is_an_error(kind):
    """Those that are read once are first read for the means."""
    teacher = Idle()
    with pytest.raises(UnsupportedModel, match=r"idle\.W_o: must be a module that runs"):
        hp.recover_(cut(teacher), kind([torch.randn(2, 3, 8)]), "mean_fold", teacher)
    assert not any(m._forward_pre_hooks for m in teacher.modules())
