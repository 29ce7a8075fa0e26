"""The stored form of every value: round trip, digest, and messages that say where a document is
wrong."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from headprune.core.agreement import Agreement, Measure, Pair
from headprune.core.changed import ChangedAnswer, ChangedAnswers
from headprune.core.codec import EMPTY, FrozenDict, Value
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.files import sha256_file
from headprune.core.heads import AttentionSite, HeadId, HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.record import Proof, QualityRow, RunRecord, SizeRow, SpeedRow
from headprune.core.samples import Samples
from headprune.core.scores import Cost, CostTable, HeadScores, ModelFingerprint
from headprune.report.difference import PlanDifference
from tests.report_records import sweep_table

SITES = (
    AttentionSite("encoder.0", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3), shared_with=("alias",)),
    AttentionSite("decoder.ä", "llama", "causal", 4, 2, 8, 6, (2, 3)),
)
SCORES = HeadScores(
    sites=SITES,
    values=((0.1, 1e-300, -3.0, 2.5), (7.0,)),
    standard_errors=((0.0, 0.1, 0.2, 0.3), (0.4,)),
    scorer="taylor",
    settings=FrozenDict({"reduce": "example", "nested": {"steps": [1, 2.5, None, True]}}),
    n_examples=32,
    model=ModelFingerprint("structure", "weights"),
    data="d" * 8,
    seed=3,
    costs=CostTable(Cost(9, 8, 7, 6, 5), ((Cost(1, 1, 1, 1, 1),) * 4, (Cost(2, 2, 2, 2, 2),)), 128),
)
MASK = HeadMask.from_keep({"encoder.0": [1, 3]}, {"encoder.0": 4, "decoder.ä": 4})
PLAN = PruningPlan(
    MASK, Budget(keep_macs=0.5, length=7), "uniform", FrozenDict({"min_heads": 1}), "taylor", "hash"
)
RECORD = RunRecord(
    name="demo",
    status="failed",
    stage="score",
    created="2024-01-01T00:00:00Z",
    recipe=FrozenDict({"model": {"name": "x"}, "list": [{"a": 1}, []]}),
    scores=SCORES,
    plan=PLAN,
    quality=(
        QualityRow("base", 8, "accuracy", 0.9, "test", 100, 0.3),
        QualityRow("r", 4, "a", 1, "t", 1, 2.0, 5, 0.1),
    ),
    speed=(SpeedRow(1, 128, 0.1, 0.2, 0.05, 0.1, 2.0, 1.9, 2.1, 50),),
    size=(SizeRow("parameters", 10, 5),),
    proofs=(Proof("logits", 1e-7, 3.0, 1e-5, "float32", 4),),
    warnings=("slow", "old"),
    error="ValueError: no",
)
PAIR = Pair(0, 1, Measure(0.5, 0.25, 0.75), Measure(-1), Measure(0))
DIFFERENT = PlanDifference(("a", "b"), ("A", "B"), 8, 3, 2, (HeadId("encoder.0", 3),), ())
EXAMPLES = [
    HeadId("encoder.0", 3),
    *SITES,
    MASK,
    SCORES,
    dataclasses.replace(SCORES, standard_errors=None, costs=None, seed=None, data=None),
    dataclasses.replace(
        SCORES, samples=Samples.of([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]), notes=("one", "two")
    ),
    Agreement(("a", "b"), 2, 5, 0.95, (PAIR,), ("note",)),
    Budget(keep_heads=3),
    Budget(keep_heads=1),
    Budget(keep_heads=1.0),
    Budget(keep_kv=1),
    Budget(keep_macs=0.5, length=7),
    Budget(speedup=1.3),
    LatencyTable(
        1.0, (SiteLatency("a", (None, 0.3, 0.4)),), 8, 128, "a device", "float32", ("note",)
    ),
    sweep_table(),
    PLAN,
    PruningPlan(MASK),
    SiteBudget("cross", Budget(keep_heads=0.5)),
    dataclasses.replace(
        PLAN, budget=None, budgets=(SiteBudget("*encoder*", Budget(keep_kv=0.5)),), policy="free"
    ),
    dataclasses.replace(PLAN, model=ModelFingerprint("s", "w"), notes=("one", "two")),
    RECORD,
    RunRecord("demo", "running", "start", "now"),
    ChangedAnswers(9, 1, 0, 0, (ChangedAnswer(3, "text", "yes", "yes", "no"),)),
]


def test_every_value_class_of_core_has_an_example():
    own = {cls for cls in Value.__subclasses__() if cls.__module__.startswith("headprune.core.")}
    assert own <= {type(e) for e in EXAMPLES}


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda v: type(v).__name__)
def test_json_round_trip_hash_and_digest(value, tmp_path):
    again = type(value).from_json(value.to_json())
    assert again == value
    assert hash(again) == hash(value)
    assert again.digest == value.digest
    assert again.to_json() == value.to_json()
    assert again is not value
    path = value.save(tmp_path / "deep" / "value.json")
    assert type(value).load(path) == value
    data = json.loads(
        path.read_text(encoding="utf-8"), parse_constant=lambda c: pytest.fail(f"{c} is not JSON")
    )
    assert list(data)[:2] == ["headprune", "version"]
    assert (data["headprune"], data["version"]) == (type(value).__name__, 1)
    first = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first, None)


def test_types_survive_that_json_would_blur():
    assert type(Budget.from_json(Budget(keep_heads=1).to_json()).amount) is int
    assert type(Budget.from_json(Budget(keep_heads=1.0).to_json()).amount) is float
    back = HeadScores.from_json(SCORES.to_json())
    steps = back.settings["nested"]["steps"]
    assert steps == (1, 2.5, None, True)
    assert [type(v) for v in steps] == [int, float, type(None), bool]
    assert type(back.values[1][0]) is float


def test_the_digest_tells_values_apart_and_equal_ones_not():
    digests = [e.digest for e in EXAMPLES]
    assert len(set(digests)) == len(EXAMPLES)
    assert all(len(d) == 64 for d in digests)
    assert PruningPlan(MASK, settings=FrozenDict({"a": 1, "b": 2})).digest == (
        PruningPlan(MASK, settings=FrozenDict({"b": 2, "a": 1})).digest
    )
    whole = dataclasses.replace(SCORES, values=((1, 2, 3, 4), (5,)))
    floats = dataclasses.replace(SCORES, values=((1.0, 2.0, 3.0, 4.0), (5.0,)))
    assert whole == floats
    assert whole.digest == floats.digest == HeadScores.from_json(whole.to_json()).digest


# --- documents that are wrong


def put(value, path, new):
    """The stored form of a value, with another thing at a dotted path; DROPPED takes it away."""
    data = json.loads(value.to_json())
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    inside = data
    for step in steps:
        inside = inside[step]
    if new is DROPPED:
        del inside[last]
    else:
        inside[last] = new
    return data


DROPPED = object()
WRONG = [
    ("headprune", "Budget", ".headprune: must be 'RunRecord', got 'Budget'"),
    ("headprune", DROPPED, ".headprune: must be 'RunRecord', got None"),
    ("version", 2, ".version: must be 1, got 2. Another version of headprune wrote it"),
    ("stagee", "x", ".stagee: must be a known key, got 'stagee'. Did you mean 'stage'?"),
    ("stage", DROPPED, ": must be complete (with stage), got only name, status, created"),
    ("stage", None, ".stage: must be of type str, got None"),
    ("status", "fine", ".status: must be running, done, failed or interrupted, got 'fine'"),
    ("recipe", [1], ".recipe: must be a JSON object, got list"),
    ("quality", {}, ".quality: must be a JSON list, got dict"),
    ("warnings", "slow", ".warnings: must be a JSON list, got str"),
    ("quality.1.spread", "low", ".quality[1].spread: must be of type float, got 'low'"),
    ("quality.0.kept_heads", 1.5, ".quality[0].kept_heads: must be of type int, got 1.5"),
    ("quality.0.kept_heads", True, ".quality[0].kept_heads: must be of type int, got True"),
    ("quality.0.trained", 0, ".quality[0].trained: must be of type bool, got 0"),
    ("quality.0", 7, ".quality[0]: must be a JSON object with the fields of QualityRow, got int"),
    ("scores.sites.1.head_dmi", 8, ".scores.sites[1].head_dmi: must be a known key"),
    ("scores.costs.units.0.2.params", DROPPED, ".scores.costs.units[0][2]: must be complete"),
    ("scores.values.0.1", False, ".scores.values[0][1]: must be of type float, got False"),
    ("plan.mask.rows.0.kept.0", "1", ".plan.mask.rows[0].kept[0]: must be of type int, got '1'"),
    ("plan.budget.length", 1.5, ".plan.budget.length: must be of type int, got 1.5"),
]


@pytest.mark.parametrize(("path", "new", "message"), WRONG, ids=[m for _, _, m in WRONG])
def test_a_wrong_document_is_refused_with_its_path(path, new, message):
    with pytest.raises(InvalidValue, match=re.escape(f"RunRecord{message}")):
        RunRecord.from_dict(put(RECORD, path, new))


def test_the_file_is_named_in_the_message(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.to_json()) | {"selektor": 1}))
    with pytest.raises(InvalidValue, match=r"plan\.json\.selektor: .*Did you mean 'selector'"):
        PruningPlan.load(path)
    with pytest.raises(InvalidValue, match=r"missing\.json: must be a readable PruningPlan file"):
        PruningPlan.load(tmp_path / "missing.json")
    for damage, words in ((b"\xff\xfe", "a readable PruningPlan file"), (b"{", "valid JSON")):
        path.write_bytes(damage)
        with pytest.raises(InvalidValue, match=rf"plan\.json: must be {words}"):
            PruningPlan.load(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "a JSON object, got list"),
        ("null", "a JSON object, got NoneType"),
        ("{", "valid JSON"),
        ("[" * 100_000, "valid JSON"),
    ],
    ids=lambda text: text[:4],
)
def test_text_that_is_no_value_is_refused(text, words):
    with pytest.raises(InvalidValue, match=f"Budget: must be {words}") as caught:
        Budget.from_json(text)
    assert isinstance(caught.value, HeadPruneError)
    assert isinstance(caught.value, ValueError)


def nested(depth):
    return {"a": nested(depth - 1)} if depth else [1]


@pytest.mark.parametrize(
    ("value", "path", "new", "message"),
    [
        (DIFFERENT, "names", ["a", "b", "c"], ".names: must be a list of 2 items, got 3 items"),
        (PLAN, "settings", nested(52), ".settings: must be nested at most 50 deep, got deeper"),
        (PLAN, "settings.a", 10**40, ": must be valid JSON, got a whole number of 41 digits"),
    ],
    ids=["items", "deep", "digits"],
)
def test_more_than_any_value_of_ours_has_is_refused(value, path, new, message):
    with pytest.raises(InvalidValue, match=re.escape(type(value).__name__ + message)):
        type(value).from_json(json.dumps(put(value, path, new)))


def test_what_is_just_short_of_that_is_taken():
    settings = {"a": 10**39, "b": nested(49)}
    data = {**json.loads(PLAN.to_json()), "settings": settings}
    assert PruningPlan.from_json(json.dumps(data)).settings == FrozenDict(settings)


# --- numbers that JSON lacks


def test_nan_and_infinities_survive_as_strict_json():
    errors = ((math.nan, math.inf, -math.inf, 0.5), (0.1,))
    scores = dataclasses.replace(SCORES, standard_errors=errors)
    record = RunRecord(
        "r", "done", "s", "c", metrics=FrozenDict({"worst": math.inf, "deep": [{"x": -math.inf}]})
    )
    for value in (scores, record):
        json.loads(value.to_json(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    back = HeadScores.from_json(scores.to_json())
    assert math.isnan(back.standard_errors[0][0])
    assert back.standard_errors[0][1:] == (math.inf, -math.inf, 0.5)
    assert back.digest == scores.digest
    assert RunRecord.from_json(record.to_json()) == record
    quality = QualityRow("base", 1, "perplexity", math.inf, "test", 1, math.inf, spread=math.inf)
    record = RunRecord("r", "done", "s", "c", quality=(quality,))
    assert RunRecord.from_json(record.to_json()) == record


def test_numpy_floats_are_stored_like_pythons():
    numpy = pytest.importorskip("numpy", reason="NumPy's scalars are the subject")
    metrics = FrozenDict({"a": numpy.float64("inf"), "b": numpy.float64(0.1)})
    record = RunRecord("r", "done", "s", "c", metrics=metrics)
    back = RunRecord.from_json(record.to_json())
    assert dict(back.metrics) == {"a": math.inf, "b": 0.1}
    assert back.digest == record.digest


# --- FrozenDict


def test_a_frozen_dict_is_immutable_hashable_and_a_copy():
    inner = {"b": [1, {"c": 2}]}
    frozen = FrozenDict({"a": inner, 3: "x"})
    inner["b"][1]["c"] = 99
    inner["b"].append(1)
    assert frozen["a"]["b"] == (1, FrozenDict({"c": 2}))
    assert list(frozen) == ["a", "3"]
    assert len(frozen) == 2
    for mapping in (frozen, frozen["a"]):
        with pytest.raises(TypeError):
            mapping["b"] = 1
    assert hash(FrozenDict({"x": 1, "y": 2})) == hash(FrozenDict({"y": 2, "x": 1}))
    assert FrozenDict({"x": 1}) == {"x": 1} != FrozenDict({"x": 2})
    assert FrozenDict() == EMPTY == {}
    assert "x" not in frozen


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j])
def test_a_frozen_dict_holds_json_data_only(value):
    with pytest.raises(InvalidValue, match="a stored value: must be JSON data"):
        FrozenDict({"a": [value]})


def test_a_path_is_stored_as_its_text():
    found = FrozenDict({"model": Path("a") / "b", "list": [Path("c")]})
    assert found == {"model": str(Path("a/b")), "list": ("c",)}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_mapping_that_spells_a_number_comes_back_as_a_mapping(depth):
    """Also settings that are nothing else."""
    value = "nan"
    for _ in range(depth):
        value = {"float": value}
    for settings in (FrozenDict({"a": value, "b": [value], "c": math.inf}), FrozenDict(value)):
        plan = dataclasses.replace(PLAN, settings=settings)
        assert PruningPlan.from_json(plan.to_json()).settings == settings


@dataclasses.dataclass(frozen=True)
class Ratio(Value):
    """A value that anything may be put into, and that its own numbers can confuse."""

    above: int
    below: int
    what: Any = None

    def __post_init__(self):
        object.__setattr__(self, "share", self.above / self.below)


def test_a_constructor_that_its_values_confuse_is_told_in_words():
    ratio = Ratio(1, 2, FrozenDict({"x": [math.inf]}))
    assert Ratio.from_json(ratio.to_json()).what == {"x": [math.inf]}
    with pytest.raises(InvalidValue, match=r"Ratio: must be a valid Ratio, got .* ZeroDivision"):
        Ratio.from_json(Ratio(1, 2).to_json().replace("2", "0"))


# --- files


def test_sha256_of_a_file_longer_than_one_piece(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a" * 1_000_000 + b"b" * 1_000_000)
    # sha256sum of the same bytes
    assert sha256_file(path) == "af1d4dc65b0fc058024a01f569b02a5ae351de9a8f9ea052a52c135d920c3e07"
    path.write_bytes(b"")
    assert sha256_file(path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
