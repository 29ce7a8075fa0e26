"""Gates on the GPU: a closed head is a zeroed head, open gates are the same bits, and every kernel
keeps to it."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import headprune as hp
from headprune.layouts import registry
from headprune.model.running import call
from tests.gpu import tolerances
from tests.gpu.models import NAMES, gated_and_pruned, output, subject
from tests.gpu.modes import AUTOCAST, BF16, FP16, FP32, FP64, MODES, computing, usable
from tests.laws.support import logits, objective
from tests.reference import scores as reference

CPU = torch.device("cpu")
#: Kernels that take what they are given here on every GPU of the last years: a refusal of theirs is
#: a failure.
EXPECTED = (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION)


@torch.no_grad()
def zero_(model, of, mask):
    """Zeroes what the output projection reads of the heads that a mask does not keep."""
    for site in of.sites:
        projection = reference.projection(model, site)
        for head in mask.removed(site.name):
            projection.weight[:, reference.columns(site, head)] = 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", NAMES)
def test_a_closed_gate_is_a_zeroed_head(compare, device, of, mode):
    usable(mode, device)
    found = subject(of)
    model, batch = found.copy(device, mode.dtype), found.data(device, mode.dtype)[0]
    mask = found.ragged(1)
    with computing(mode, device):
        whole = output(model, batch)
        with hp.gated(model, mask):
            gated = output(model, batch)
    model = found.copy(device, mode.dtype)
    zero_(model, found, mask)
    # Anew: autocast keeps its narrow copies of weights for the length of a block.
    with computing(mode, device):
        zeroed = output(model, batch)
    compare(f"gated and zeroed heads of the {of}", gated, zeroed, tolerances.OUTPUTS, mode.name)
    compare.differs(f"heads of the {of} do something", gated, whole, tolerances.OUTPUTS, mode.name)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", NAMES)
def test_open_gates_are_the_same_bits(compare, device, of, mode):
    usable(mode, device)
    found = subject(of)
    model, batch = found.copy(device, mode.dtype), found.data(device, mode.dtype)[0]
    ones = {s.name: torch.ones(s.n_query_heads, device=device) for s in found.sites}
    with computing(mode, device):
        whole = output(model, batch)
        with hp.gated(model, ones):
            gated = output(model, batch)
        after = output(model, batch)
    compare.same(f"no gate is left on the {of}", after, whole, mode.name)
    if any(registry.get(site.layout).exposed is not None for site in found.sites):
        # Code of ours calls its output projection as long as there are gates: equal up to rounding.
        compare(f"open gates of the {of}", gated, whole, tolerances.OUTPUTS, mode.name)
    else:
        compare.same(f"open gates of the {of}", gated, whole, mode.name)


@pytest.mark.parametrize("mode", [FP64, FP32, AUTOCAST, BF16, FP16], ids=lambda mode: mode.name)
def test_gates_of_every_example(compare, device, mode):
    """``[batch, heads]``: each example as if it were alone with its own gates, on the CPU in
    fp64."""
    found = subject("encoder")
    generator = torch.Generator().manual_seed(0)
    table = {
        s.name: torch.rand(4, s.n_query_heads, generator=generator).half().float()
        for s in found.sites
    }
    model, batch = found.copy(device, mode.dtype), found.data(device, mode.dtype)[0]
    gates = {name: gate.to(device) for name, gate in table.items()}
    with computing(mode, device), hp.gated(model, gates):
        together = output(model, batch)
    model, batch, alone = found.copy(CPU, FP64.dtype), found.data(CPU, FP64.dtype)[0], []
    for row in range(4):
        gates = {name: gate[row].double() for name, gate in table.items()}
        with computing(FP64, CPU), hp.gated(model, gates):
            alone.append(output(model, reference.example(batch, row)))
    compare("gates [batch, heads]", together, torch.cat(alone), tolerances.OUTPUTS, mode.name)


@pytest.mark.parametrize("of", NAMES)
def test_gradients_of_gates(compare, device, of):
    found, slopes = subject(of), []
    for where in (device, CPU):
        model, batch = found.copy(where, FP64.dtype), found.data(where, FP64.dtype)[0]
        gates = {
            s.name: torch.ones(4, s.n_query_heads, device=where, requires_grad=True)
            for s in found.sites
        }
        with computing(FP64, where), hp.gated(model, gates):
            gradients = torch.autograd.grad(
                objective(logits(model, batch).cpu()), list(gates.values())
            )
        slopes.append(list(gradients))
    compare(f"gradients of gates of the {of}", *slopes, tolerances.GATE_GRADIENTS, "fp64")


def full_length(of, device, dtype):
    """A batch without padding, which some kernels refuse."""
    batch = of.data(device, dtype)[0]
    return {"input_ids": batch["input_ids"].clamp(min=3)}


@pytest.mark.parametrize(
    "backend", SDPBackend.__members__.values(), ids=lambda backend: backend.name
)
@pytest.mark.parametrize("of", ["encoder", "decoder"])
def test_every_kernel_of_sdpa(compare, device, of, backend):
    """Forced one after the other: gated equals pruned equals the CPU in fp64."""
    if backend in (SDPBackend.ERROR, SDPBackend.OVERRIDEABLE):
        pytest.skip("no kernel of PyTorch's own")
    found, mode, mask = subject(of), BF16, subject(of).ragged(1)
    model, batch = found.copy(device, mode.dtype), full_length(found, device, mode.dtype)
    # Kernels say by warnings why they refuse: these are what is written down.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(backend):
                gated, pruned = gated_and_pruned(model, mask, batch)
        except RuntimeError as error:
            why = " ".join([str(error), *(str(w.message) for w in said)])[:600]
            compare.note("a kernel refuses", kernel=backend.name, of=of, why=why)
            if device.type == "cuda" and of == "encoder" and backend in EXPECTED:
                raise
            pytest.skip(f"{backend.name} refuses the {of}")
    name = f"{backend.name} of the {of}"
    compare(f"gated and pruned, {name}", pruned, gated, tolerances.OUTPUTS, "bf16")
    with computing(FP64, CPU):
        model = found.copy(CPU, FP64.dtype)
        hp.prune_(model, mask)
        wanted = output(model, full_length(found, CPU, FP64.dtype))
    compare(f"the GPU and the CPU, {name}", pruned, wanted, tolerances.OUTPUTS, "bf16")


@pytest.mark.parametrize("of", ["encoder", "decoder", "vision"])
def test_eager_attention(compare, device, of):
    found, mask = subject(of), subject(of).ragged(1)
    model, batch = found.copy(device), found.data(device)[0]
    with computing(FP32, device):
        with hp.gated(model, mask):
            fused = output(model, batch)
        model.set_attn_implementation("eager")
        eager, pruned = gated_and_pruned(model, mask, batch)
    close = tolerances.OUTPUTS["fp32"]
    compare(f"eager and fused attention of the {of}", eager, fused, close, "fp32")
    compare(f"gated and pruned, eager attention of the {of}", pruned, eager, close, "fp32")


def test_a_compiled_model(compare, device):
    """Gates take effect after compilation, other ones the next time, and none afterwards.

    Inductor on a GPU alone: for a CPU it needs a compiler and half a minute. One layer says all,
    and takes less time.
    """
    found = subject("torch")
    model, batch = found.copy(device), found.data(device)[0]
    del model.encoder.layers[1:]
    (site,) = hp.find_sites(model)
    backend, close = "inductor" if device.type == "cuda" else "eager", tolerances.OUTPUTS["fp32"]
    masks = [
        hp.HeadMask.from_keep({site.name: keep}, {site.name: 6}) for keep in ([0, 3], [1, 2, 5])
    ]
    # Dynamo and inductor warn of what they may improve, each version of other things.
    with warnings.catch_warnings(), computing(FP32, device), torch.no_grad():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        before = call(compiled, batch)
        for number, mask in enumerate(masks):
            with hp.gated(compiled, mask):
                got = call(compiled, batch)
            with hp.gated(model, mask):
                wanted = call(model, batch)
            compare(f"compiled ({backend}) with gates {number}", got, wanted, close, "fp32")
            compare.differs(f"compiled gates {number} do something", got, before, close, "fp32")
        after = call(compiled, batch)
    compare("compiled, after the gates", after, before, close, "fp32")


def test_gates_may_lie_on_the_cpu(compare, device):
    found = subject("encoder")
    model, batch, gates = found.copy(device), found.data(device)[0], torch.rand(4, 8)
    outputs = []
    for where in (CPU, device):
        with (
            nullcontext() if device.type == "cpu" else computing(FP32, device),
            hp.gated(model, gates.to(where)),
        ):
            outputs.append(output(model, batch))
    compare("gates on the CPU and on the GPU", *outputs, tolerances.EXACT, "fp32")


def test_layouts_of_all_models_are_known(compare):
    """The checks above run over the layouts that they mean to."""
    found = {site.layout for name in NAMES for site in subject(name).sites}
    compare.note("layouts", names=sorted(found))
    assert len(found) == len(NAMES)
    assert found <= set(registry.names())
