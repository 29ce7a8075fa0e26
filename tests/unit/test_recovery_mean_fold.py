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
from headprune.recovery import MeanFold, Recovery, RecoveryReport, registry
from headprune.surgery.prune import prune_

LAYOUTS = ["bert", "gpt2", "llama", "multi_head_attention", "vit"]
EXACT = {"rtol": 0, "atol": 1e-10}


def double(batch):
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def build(name, seed=0):
    """A tiny fp64 model in evaluation mode and two unlike batches, of 3 examples and of 1."""
    model, batch = layouts.get(name).tiny(seed)
    second = {k: v[:1] for k, v in layouts.get(name).tiny(seed + 1)[1].items()}
    return model.double().eval(), [double(batch), double(second)]


def some_heads(model, whole=None):
    """A mask without the second unit of every site, and without any head of site ``whole``."""
    sites = find_sites(model)
    keep = {
        s.name: [h for h in s.heads if h not in s.units[1] and i != whole]
        for i, s in enumerate(sites)
    }
    return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


def keep(model, heads):
    sites = find_sites(model)
    return HeadMask.from_keep(
        {s.name: heads for s in sites}, {s.name: s.n_query_heads for s in sites}
    )


def padding(batch, shape):
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if isinstance(batch, dict) and "valid_lens" in batch:
        mask = torch.arange(shape[1]) < batch["valid_lens"][:, None]
    return (
        mask.bool()
        if mask is not None and mask.shape == shape
        else torch.ones(shape, dtype=torch.bool)
    )


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


def test_the_registry_holds_the_methods_that_are_tested_here():
    assert registry.names() == ["finetune", "head_rescale", "lstsq", "mean_fold"]
    assert hp.recovery.MeanFold is registry.get("mean_fold") is MeanFold
    assert {"MeanFold", "Finetune", "registry"} <= set(dir(hp.recovery))
    assert all(registry.summary(name) for name in registry)
    assert all(issubclass(registry.get(name), Recovery) for name in registry)
    with pytest.raises(AttributeError, match="Did you mean 'MeanFold'"):
        _ = hp.recovery.MeanFolds


def test_layouts_are_all_here():
    assert len(LAYOUTS) >= 5


@pytest.mark.parametrize("whole", [None, 0], ids=["some heads", "a site without heads"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_mean_fold_equals_the_teacher_with_mean_ablated_heads(name, whole):
    teacher, batches = build(name)
    model = copy.deepcopy(teacher)
    mask = some_heads(model, whole)
    prune_(model, mask)
    before = [run(model, b) for b in batches]
    report = hp.recover_(model, batches, "mean_fold", teacher)
    oracle = ablated(teacher, mask, batches)
    for batch, old in zip(batches, before, strict=True):
        got = run(model, batch)
        torch.testing.assert_close(got, run(oracle, batch), **EXACT)
        assert (
            max((a - b).abs().max() for a, b in zip(got, old, strict=True)) > 1e-4
        )  # the fold did something
    assert report.metrics["heads"] == mask.n_heads - mask.n_kept
    assert report.n_examples == 4
    assert len(report.changed) == len(mask.rows)
    assert set(report.changed) <= {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_the_biases_change_and_the_teacher_is_left_alone(name):
    teacher, batches = build(name)
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    teacher.train()
    frozen = next(teacher.parameters())
    frozen.requires_grad_(False)
    before, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(teacher.state_dict())
    random = torch.get_rng_state()
    report = hp.recover_(model, batches, MeanFold(), teacher)
    for key, value in model.state_dict().items():
        if key in report.changed:
            assert key.endswith(".bias")
            assert key not in before or not torch.equal(value, before[key])
        else:
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    torch.testing.assert_close(dict(teacher.state_dict()), dict(kept), rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), random, rtol=0, atol=0)
    assert all(m.training for m in teacher.modules())
    assert not frozen.requires_grad
    assert not model.training
    assert not any(m._forward_pre_hooks for m in teacher.modules())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_padding_does_not_count(name):
    teacher, (batch, _) = build(name)
    single = {k: v[2:] for k, v in batch.items() if k != "labels"}
    length = int(single["attention_mask"].sum())
    bare = {k: v[:, :length] for k, v in single.items()}
    assert 0 < length < single["input_ids"].shape[1]
    biases = []
    for batches in ([single], [bare]):
        model = copy.deepcopy(teacher)
        prune_(model, some_heads(model))
        report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
        biases.append([model.get_parameter(n) for n in report.changed])
    torch.testing.assert_close(biases[0], biases[1], **EXACT)


def test_each_token_counts_once_whatever_the_batches():
    """A mean of the batches' means would weigh a token of a small batch more."""
    teacher, (batch, _) = build("bert")
    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(3)]
    biases = []
    for batches in (
        [batch],
        rows,
        iter(rows),
        [{k: v[:1] for k, v in batch.items()}, {k: v[1:] for k, v in batch.items()}],
    ):
        model = copy.deepcopy(teacher)
        prune_(model, some_heads(model))
        report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
        biases.append([model.get_parameter(n) for n in report.changed])
    for other in biases[1:]:
        torch.testing.assert_close(other, biases[0], **EXACT)


def test_a_projection_without_a_bias_gets_one_that_is_a_parameter():
    teacher, batches = build("llama")
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model, whole=1))
    first = model.model.layers[0].self_attn.o_proj
    first.weight.requires_grad_(False)
    assert first.bias is None
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert report.metrics["biases_added"] == 3
    assert report.changed == tuple(f"model.layers.{i}.self_attn.o_proj.bias" for i in range(3))
    assert set(report.changed) <= model.state_dict().keys()
    assert type(first.bias) is nn.Parameter
    assert first.bias.dtype is torch.float64
    assert (
        first.bias.requires_grad,
        model.model.layers[2].self_attn.o_proj.bias.requires_grad,
    ) == (False, True)
    assert [s.heads for s in find_sites(model)] == [
        (0, 1, 4, 5),
        (),
        (0, 1, 4, 5),
    ]  # its layout still fits


def test_an_existing_bias_stays_the_same_parameter():
    """An optimizer made before, and what ties it, must go on holding it."""
    teacher, batches = build("gpt2")
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    before = model.transformer.h[0].attn.c_proj.bias
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert model.transformer.h[0].attn.c_proj.bias is before
    assert report.metrics["biases_added"] == 0


def test_narrow_models_are_folded_in_wide_arithmetic():
    """In bf16 a running sum stalls once it is 256 times as large as what is added."""
    torch.manual_seed(0)
    wide = nn.Sequential(hp.MultiHeadAttention(8, 4)).double()
    batches = [1 + 0.1 * torch.randn(1, 2, 8, dtype=torch.float64) for _ in range(600)]
    biases = []
    for dtype in (torch.float64, torch.bfloat16):
        teacher = copy.deepcopy(wide).to(dtype)
        model = copy.deepcopy(teacher)
        prune_(model, keep(model, []))
        hp.recover_(model, [b.to(dtype) for b in batches], MeanFold(measure=False), teacher)
        biases.append(model[0].W_o.bias.detach())
    assert biases[1].dtype is torch.bfloat16
    # bf16 keeps 8 bits, and the teacher's weights and activations carry that error too
    torch.testing.assert_close(
        biases[1].double(), biases[0], rtol=0, atol=0.02 * float(biases[0].abs().max())
    )


class Shared(nn.Module):
    """One attention module that runs twice."""

    def __init__(self):
        super().__init__()
        attention = hp.MultiHeadAttention(8, 4)
        self.layers = nn.ModuleList([attention, attention])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_shared_module_is_folded_once_over_all_its_runs():
    torch.manual_seed(0)
    teacher, batches = Shared().double(), [torch.randn(2, 3, 8, dtype=torch.float64)]
    model = copy.deepcopy(teacher)
    mask = some_heads(model)
    prune_(model, mask)
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert report.changed == ("layers.0.W_o.bias",)
    torch.testing.assert_close(
        run(model, batches[0]), run(ablated(teacher, mask, batches), batches[0]), **EXACT
    )
    # the same, where both names are given as sites
    (site,) = find_sites(teacher)
    twice = [site, dataclasses.replace(site, name="layers.1", shared_with=())]
    other = copy.deepcopy(teacher)
    prune_(other, mask)
    report = hp.recover_(other, batches, "mean_fold", teacher=teacher, sites=twice)
    assert (report.changed, report.metrics["heads"]) == (("layers.0.W_o.bias",), 1)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **EXACT)


def test_a_bias_that_two_projections_share_is_refused():
    torch.manual_seed(0)
    teacher = nn.Sequential(hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4))
    teacher[1].W_o.bias = teacher[0].W_o.bias
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedModel, match=r"0\.W_o\.bias: must be the bias of one projection.*'1\.W_o'"
    ):
        hp.recover_(model, [torch.randn(2, 3, 8)], teacher=teacher)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_cut_fold_cut_fold_folds_every_head_once():
    teacher, batches = build("gpt2")
    first, both = keep(teacher, [0, 2, 3]), keep(teacher, [0, 3])
    model = copy.deepcopy(teacher)
    prune_(model, first)
    hp.recover_(model, batches, "mean_fold", teacher=teacher)
    prune_(model, both)
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert report.metrics["heads"] == 3
    assert "3 removed heads had been folded before" in str(report)
    torch.testing.assert_close(
        run(model, batches[0]), run(ablated(teacher, both, batches), batches[0]), **EXACT
    )
    again = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert (again.changed, again.metrics["heads"]) == ((), 0)
    assert "Nothing to fold" in again.notes[-1]
    torch.testing.assert_close(
        run(model, batches[0]), run(ablated(teacher, both, batches), batches[0]), **EXACT
    )


def test_a_teacher_that_was_cut_itself_gives_the_heads_that_it_still_has():
    teacher, batches = build("bert")
    prune_(teacher, keep(teacher, [1, 2, 3]))
    model = copy.deepcopy(teacher)
    mask = keep(teacher, [1, 3])
    prune_(model, mask)
    assert hp.recover_(model, batches, "mean_fold", teacher=teacher).metrics["heads"] == 3
    torch.testing.assert_close(
        run(model, batches[0]), run(ablated(teacher, mask, batches), batches[0]), **EXACT
    )


def test_a_model_that_lost_nothing_is_left_as_it_is():
    teacher, batches = build("bert")
    model = copy.deepcopy(teacher)
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert report.changed == ()
    assert "Nothing to fold" in report.notes[0]
    torch.testing.assert_close(model.state_dict(), teacher.state_dict(), rtol=0, atol=0)


def test_sites_of_a_layout_of_your_own_reach_teacher_and_model():
    layout = dataclasses.replace(layouts.get("multi_head_attention"), name="mine")
    torch.manual_seed(0)
    teacher = nn.Sequential(hp.MultiHeadAttention(8, 4))
    sites = find_sites(teacher, [layout])
    model = copy.deepcopy(teacher)
    mask = some_heads(model)
    prune_(model, mask, sites=sites)
    batches = [torch.randn(2, 3, 8)]
    assert hp.recover_(model, batches, "mean_fold", teacher=teacher, sites=sites).changed == (
        "0.W_o.bias",
    )


def test_a_compiled_model_and_teacher_are_looked_at_from_inside():
    teacher, batches = build("bert")
    model = copy.deepcopy(teacher)
    mask = some_heads(model)
    prune_(model, mask)
    compiled = (torch.compile(one, backend="eager") for one in (model, teacher))
    report = hp.recover_(next(compiled), batches, "mean_fold", teacher=next(compiled))
    assert len(report.changed) == 3
    torch.testing.assert_close(
        run(model, batches[0]), run(ablated(teacher, mask, batches), batches[0]), **EXACT
    )


def test_the_report_is_a_value():
    teacher, batches = build("bert")
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    report = hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert RecoveryReport.from_json(report.to_json()) == report
    assert report.method == "mean_fold"
    assert str(report).startswith("mean_fold: 3 parameters changed, 4 examples, ")


def test_errors_are_reported_where_the_batches_can_be_read_again():
    teacher, batches = build("bert")
    reports, models = [], []
    for given, method in (
        (batches, MeanFold()),
        (iter(batches), MeanFold()),
        (iter(batches), MeanFold(measure=False)),
    ):
        models.append(copy.deepcopy(teacher))
        prune_(models[-1], some_heads(models[-1]))
        reports.append(hp.recover_(models[-1], given, method, teacher))
    for model in models[1:]:
        torch.testing.assert_close(model.state_dict(), models[0].state_dict(), rtol=0, atol=0)
    assert list(reports[0].metrics["errors"]) == [
        name.removesuffix(".bias") for name in reports[0].changed
    ]
    assert reports[0].metrics["error_after"] < reports[0].metrics["error_before"]
    assert "errors" not in reports[1].metrics
    assert reports[1].notes == ("No errors are reported: the batches can be read only once.",)
    assert "errors" not in reports[2].metrics
    assert reports[2].notes == ()


def pruned_pair():
    teacher, batches = build("bert")
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    return model, teacher, batches


def test_the_teacher_must_be_given_and_be_another_model():
    model, teacher, batches = pruned_pair()
    with pytest.raises(
        InvalidValue,
        match=r"teacher: must be the unpruned original, which mean_fold needs, got None",
    ):
        hp.recover_(model, batches, "mean_fold")
    with pytest.raises(InvalidValue, match="got the model itself"):
        hp.recover_(model, batches, "mean_fold", teacher=model)
    with pytest.raises(InvalidValue, match="got the model itself"):
        hp.recover_(model, batches, "mean_fold", teacher=torch.compile(model, backend="eager"))
    teacher.classifier = model.classifier
    with pytest.raises(InvalidValue, match="shares trainable parameters"):
        hp.recover_(model, batches, "mean_fold", teacher=teacher)


def test_a_teacher_of_another_structure_is_refused():
    model, teacher, batches = pruned_pair()
    with pytest.raises(
        PlanMismatch, match="teacher: must be the model that the pruned one was cut from"
    ):
        hp.recover_(model, batches, "mean_fold", teacher=build("gpt2")[0])
    with pytest.raises(
        PlanMismatch, match="teacher: must be the model that the pruned one was cut from"
    ):
        hp.recover_(model, batches, "mean_fold", teacher=build("gpt2")[0], sites=find_sites(model))
    teacher.bert.encoder.layer = teacher.bert.encoder.layer[:2]
    with pytest.raises(
        PlanMismatch, match="8 heads at 2 sites against BertForSequenceClassification with 12 heads"
    ):
        hp.recover_(model, batches, "mean_fold", teacher=teacher)


def test_a_teacher_without_heads_that_the_model_has_is_refused():
    model, teacher, batches = pruned_pair()
    with pytest.raises(PlanMismatch, match=r"one without heads \[1\].*swapped\?"):
        hp.recover_(teacher, batches, teacher=model)


def test_a_loss_says_how_the_teacher_is_run():
    model, teacher, batches = pruned_pair()
    # Padding is told from the batch's own attention_mask, which a nested batch hides: here nothing
    # is padded.
    batches = [
        {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])} for batch in batches
    ]
    plain, wrapped = copy.deepcopy(model), copy.deepcopy(model)
    hp.recover_(plain, batches, "mean_fold", teacher)
    nested = [{"inputs": batch} for batch in batches]
    hp.recover_(
        wrapped, nested, "mean_fold", teacher, loss=lambda m, b: m(**b["inputs"]).logits.sum(1)
    )
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(wrapped.state_dict()[name], value, rtol=0, atol=0)


def test_bad_arguments_are_refused_and_leave_the_model_alone():
    model, teacher, batches = pruned_pair()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnknownName, match="Did you mean 'mean_fold'"):
        hp.recover_(model, batches, "mean_folds", teacher)
    with pytest.raises(InvalidValue, match="Call it, to configure it"):
        hp.recover_(model, batches, MeanFold, teacher)
    with pytest.raises(InvalidValue, match=r"must be a torch\.nn\.Module"):
        hp.recover_("bert", batches, "mean_fold", teacher)
    with pytest.raises(InvalidValue, match="batches: must be at least one batch"):
        hp.recover_(model, [], "mean_fold", teacher)
    blank = {**batches[0], "attention_mask": torch.zeros(3, 7, dtype=torch.long)}
    with pytest.raises(InvalidValue, match="with a token that is no padding"):
        hp.recover_(model, [blank], "mean_fold", teacher)
    with torch.no_grad():
        teacher.bert.encoder.layer[0].attention.self.value.bias[0] = float("nan")
        teacher.bert.encoder.layer[0].attention.self.value.bias[4] = float("nan")
    with pytest.raises(
        InvalidValue,
        match=r"mean head output at bert\.encoder\.layer\.0\.attention: must be finite",
    ):
        hp.recover_(model, batches, "mean_fold", teacher)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_projection_that_never_runs_is_an_error():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4)

        def forward(self, x):
            return self.used(x)

    teacher = Idle()
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    batch = torch.randn(2, 3, 8)
    for batches in (
        [batch],
        iter([batch]),
    ):  # those that are read once are first read for the means
        with pytest.raises(UnsupportedModel, match=r"idle\.W_o: must be a module that runs"):
            hp.recover_(model, batches, "mean_fold", teacher)
    assert not any(m._forward_pre_hooks for m in teacher.modules())


def test_hooks_are_gone_after_an_error():
    model, teacher, batches = pruned_pair()
    with pytest.raises(InvalidValue, match="batch 1"):
        hp.recover_(model, [batches[0], {"input_ids": torch.full((1, 3), 10_000)}], teacher=teacher)
    assert not any(m._forward_pre_hooks for m in teacher.modules())
    assert all(p.requires_grad for p in teacher.parameters())


def test_what_was_folded_is_remembered_by_a_checkpoint(tmp_path):
    teacher, batch = layouts.get("llama").tiny(0)
    model = copy.deepcopy(teacher.eval())
    names = [s.name for s in hp.find_sites(model)]
    counts = dict.fromkeys(names, 6)
    hp.prune_(model, hp.HeadMask.from_keep({names[0]: [2, 3, 4, 5]}, counts))
    hp.recover_(model, [batch], "mean_fold", teacher)
    loaded = hp.from_pretrained(hp.save_pretrained(model, tmp_path))
    second = hp.HeadMask.from_keep({names[0]: [4, 5]}, counts)
    for cut in (model, loaded):
        hp.prune_(cut, second)
        assert hp.recover_(cut, [batch], "mean_fold", teacher).metrics["heads"] == 2
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_an_attention_without_an_output_projection_is_refused():
    teacher, batches = build("head_list_bare")
    model = copy.deepcopy(teacher)
    prune_(model, some_heads(model))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModel, match="with an output projection"):
        hp.recover_(model, batches, "mean_fold", teacher=teacher)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
