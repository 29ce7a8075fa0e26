"""The recipe: what a run is, section by section; every key is known, and everything else is an
error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headprune.core.heads import Policy
from headprune.core.plan import Budget

if TYPE_CHECKING:
    from headprune.scoring._stopping import Stable

Task = Literal[
    "text_classification",
    "regression",
    "token_classification",
    "question_answering",
    "causal_lm",
    "translation",
    "image_classification",
    "audio_classification",
]
#: The scorer, unless the recipe says another: the one with the least regret in docs/regret.md.
DEFAULT_SCORER = "auto"
#: The column of labels, unless the recipe says another.
LABEL = "label"
#: Tasks whose rows have no labels.
UNLABELLED: tuple[Task, ...] = ("causal_lm", "translation")
#: Tasks whose labels are classes: their number is that of a model's outputs.
CLASSIFICATIONS: tuple[Task, ...] = (
    "text_classification",
    "token_classification",
    "image_classification",
    "audio_classification",
)
Rows = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelSection(Section):
    """The model: from ``path``, or freshly built from ``class_name`` and ``config``, or by a
    function of one's own.

    Args:
        path: A local folder, a hub name, or ``package:NAME/FOLDER``, a folder inside an installed
            package.
        class_name: A Transformers class, or our own ``TransformerForTranslation``.
        import_path: ``package.module:function``, which builds a model of one's own: an
            ``nn.Module`` that takes what a batch holds by name (``pixel_values`` or
            ``input_values``) and gives logits ``[batch, labels]``.
        config: Keyword arguments of that class's configuration, or of that function.
        layouts: ``package.module:NAME`` of an ``AttentionLayout``, or a list of them, for attention
            of one's own.
        dtype: Of the weights; where it is left out, that of the checkpoint, and float32 for a fresh
            model.
    """

    path: str | None = None
    class_name: str | None = None
    import_path: ImportPath | None = None
    config: dict[str, Any] = {}
    layouts: ImportPath | None = None
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None


class DataSection(Section):
    """The data, and which rows are for what.

    Args:
        path: A hub name, a local json, jsonl, csv, parquet or txt file, a folder with
            train/validation/test files, or ``sklearn:digits``. A txt file is one row, column
            ``text``.
        subset, revision: Configuration and revision of a hub data set; local data has none.
        train_split, validation_split, test_split: Names of the splits; one that is named for a
        purpose serves no other.
        text: Column or columns with text (two columns make a pair); ``a.b`` is ``b`` inside of
            column ``a``. For token classification, lists of words; for question answering the
            columns of the question and of the context that its answer is a piece of.
        target: Column with the translation of the text, or what else an encoder-decoder is to make
            of it.
        prefix: Put before every text of a translation, for models that are told so what to do, as
            T5 is.
        tokenizer: Trained on the train rows, for a freshly built model on text: ``bpe`` (byte
            pairs; of a translation, one for both languages) or ``characters``, one token each.
        vocabulary: Tokens of ``bpe`` at most.
        block: Join the rows of each split and cut the text into rows of so many characters, for
            language models. Parts for validation and test are then the end of the text, and no draw
            of rows.
        tokens: Column with token numbers, for language models on data that is tokenised already.
        image: Column with images.
        audio: Column with sound: paths (from the data's folder on), ``{bytes, path}`` as data sets
            on the hub have it, or ``{array, sampling_rate}``. It is brought to the rate that the
            model's feature extractor asks for.
        seconds: Of every clip: longer ones are cut, shorter ones filled with silence, so that none
            has padding.
        label: Column with labels; of several names, the first that the train rows have. For
            question answering that of SQuAD's answers, ``{text: [...], answer_start: [...]}``;
            without any text there is no answer, as in SQuAD 2.
        labels: The label of every class of the model, in the order of its class numbers, for a
            model that does not name its classes, or otherwise than the data does.
        max_length: Longer examples are cut to this many tokens; of a question and its context, the
            context is cut.
        holdout: Rows (or fraction) of train that become validation rows where there are none.
        test_holdout: The same for test rows.
        calibration: Rows of train that heads are scored on; fewer where train is smaller.
        normalise: Subtract the mean and divide by the standard deviation of the training images. A
            freshly built model does so by default; a model from a path has an image processor of
            its own, and takes no other.
    """

    path: str
    subset: str | None = None
    revision: str | None = None
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    text: str | Annotated[list[str], Field(min_length=1, max_length=2)] | None = None
    target: str | None = None
    prefix: str = ""
    tokenizer: Literal["bpe", "characters"] | None = None
    vocabulary: Annotated[int, Field(ge=300)] | None = None
    block: Annotated[int, Field(ge=2)] | None = None
    tokens: str | None = None
    image: str = "image"
    audio: str = "audio"
    seconds: Annotated[float, Field(gt=0)] | None = None
    label: str | Annotated[list[str], Field(min_length=1)] = LABEL
    labels: Annotated[list[str | int], Field(min_length=2)] | None = None
    max_length: Positive | None = None
    holdout: Rows = 0.1
    test_holdout: Rows = 0.2
    calibration: Positive = 1024
    normalise: bool | None = None

    @property
    def text_columns(self) -> list[str]:
        """The text columns as a list."""
        return [self.text] if isinstance(self.text, str) else list(self.text or [])

    @property
    def label_columns(self) -> list[str]:
        """The names that the label column may have."""
        return [self.label] if isinstance(self.label, str) else list(self.label)


class TrainSection(Section):
    """Training before anything is scored, by the recovery ``finetune``, whose settings these
    are."""

    batch_size: Positive = 32
    epochs: Annotated[int | float, Field(gt=0)] = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    schedule: str = "linear"


class UntilSection(Section):
    """When enough data were read; see ``headprune.Stable``.

    Args:
        k: Units in the set of the lowest that must be settled.
        confidence: Probability that it is the set of all data.
    """

    k: Positive
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class ScoreSection(Section):
    """How heads are scored, and what the plan is compared with.

    Args:
        scorer: Registered name; ``auto`` where left out.
        settings: The scorer's settings.
        batch_size: Examples a batch; no score depends on it.
        until: Read no more calibration rows than it takes to settle the set of the k lowest; all
            where left out.
        magnitude: Also cut by weight magnitude at the same budget.
        random_draws: Also cut at random, this often, at the same budget.
    """

    scorer: str = DEFAULT_SCORER
    settings: dict[str, Any] = {}
    batch_size: Positive = 32
    until: UntilSection | None = None
    magnitude: bool = True
    random_draws: Annotated[int, Field(ge=0)] = 10

    @property
    def stopping(self) -> Stable | None:
        """``until`` as ``hp.score`` takes it."""
        from headprune.scoring._stopping import Stable  # imports torch

        return Stable(self.until.k, self.until.confidence) if self.until else None


class RecoverStep(Section):
    """One recovery method; several run one after the other on the same model.

    Args:
        method: Registered name.
        settings: Its settings.
        batch_size: Examples a batch.
        rows: ``calibration`` or ``train``; a method that trains takes ``train`` by default, others
            calibration rows.
    """

    method: str
    settings: dict[str, Any] = {}
    batch_size: Positive = 32
    rows: Literal["calibration", "train"] | None = None


class BudgetSection(Section):
    """Exactly one budget (see ``headprune.Budget``)."""

    keep_heads: int | float | None = None
    keep_params: int | float | None = None
    keep_macs: int | float | None = None
    keep_kv: int | float | None = None
    speedup: int | float | None = None
    length: Positive | None = None

    @property
    def budget(self) -> Budget:
        """The budget.

        Raises:
            InvalidValue: none or several are given, or one that cannot be.
        """
        return Budget(
            self.keep_heads,
            self.keep_params,
            self.keep_macs,
            self.keep_kv,
            self.speedup,
            self.length,
        )


class LatencySection(Section):
    """Where latency is measured, for budgets of speed.

    Args:
        batch_size: Examples a call.
        length: Tokens an example; that of a small batch of test rows where left out.
        seconds: About how long the latency table takes, and again the comparison of the cut model.
    """

    batch_size: Positive = 32
    length: Positive | None = None
    seconds: Annotated[float, Field(gt=0)] = 30.0


class SelectSection(BudgetSection):
    """Which heads stay: a selector, its settings, and one budget, or one for each of several groups
    of sites.

    Args:
        selector: Registered name; ``knapsack`` where it is left out with a budget of speed.
        settings: The selector's settings.
        recover: Recoveries of the copies on which the selector looks at the cut model while it
            chooses: between the steps of ``iterative``, before each measurement of
                ``local_search``.
        must_keep: Heads that must stay, by the sites' names.
        must_remove: Heads that must go, by the sites' names.
        latency: Where latency is measured, with ``speedup``.
        policy: Which heads may leave where several query heads share a key/value head (see
            ``headprune.find_sites``).
        sites: Budgets by kind of attention (self, causal, cross) or by a pattern over the sites'
            names; each group meets its own by itself, and sites that are not named keep every head.
    """

    selector: str = "global_topk"
    settings: dict[str, Any] = {}
    recover: list[RecoverStep] = []
    must_keep: dict[str, list[int]] | None = None
    must_remove: dict[str, list[int]] | None = None
    latency: LatencySection = LatencySection()
    policy: Policy = "group"
    sites: dict[str, BudgetSection] = {}

    @model_validator(mode="before")
    @classmethod
    def _default_selector(cls, data: Any) -> Any:
        groups = data.get("sites") if isinstance(data, dict) else None
        sections = [data, *(groups.values() if isinstance(groups, dict) else ())]
        timed = any(
            isinstance(section, dict) and section.get("speedup") is not None for section in sections
        )
        return {"selector": "knapsack", **data} if timed else data

    @property
    def timed(self) -> bool:
        """Whether a budget is one of speed, for which latency is measured."""
        return any(section.speedup is not None for section in (self, *self.sites.values()))

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budgets of groups of sites; empty where one budget is for all."""
        return {key: section.budget for key, section in self.sites.items()}


class GradualSection(Section):
    """Heads leave in stages while the model is trained, see ``headprune.run.prune_gradually_``;
    budget and selector are those of ``select``, and ``recover`` comes after.

    Args:
        stages: Cuts, each with a share of the steps after it.
        batch_size: Examples a batch of the training, on train rows.
        settings: Settings of the recovery ``finetune``, for all stages together.
    """

    stages: Positive = 8
    batch_size: Positive = 32
    settings: dict[str, Any] = {}


class BenchSection(Section):
    """Where speed is measured: every batch size with every length.

    Args:
        batch_sizes: Examples a call.
        lengths: Tokens an example; images and sound have a length of their own, and others take
            that of the scored examples where it is left out.
        new_tokens: Of language models also time generation: each of these as a prompt, and so many
            tokens after it.
        seconds: About how long each of these is timed.
    """

    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = [1, 32]
    lengths: Annotated[list[Positive], Field(min_length=1)] | None = None
    new_tokens: Positive | None = None
    seconds: Annotated[float, Field(gt=0)] = 2.0


class DecodeSection(Section):
    """How translations are made, of which BLEU is taken.

    Args:
        beams: 1 takes the likeliest token every time; more search so many translations at once.
        max_length: Tokens of a translation at most.
    """

    beams: Positive = 1
    max_length: Positive = 64


class Recipe(Section):
    """A whole run; see ``recipes/`` for complete ones.

    Args:
        name: Names the run and, where ``out`` is not given, its folder ``runs/<name>``.
        description: One line for ``headprune ls``.
        task: What the model does.
        metric: Of a classification: ``accuracy``, which it is where left out, or ``matthews`` for
            Matthews correlation.
        device: ``auto`` takes a GPU where there is one.
        seed: Of everything that is drawn.
        threads: CPU threads of torch; its own choice where left out.
        out: The folder of the run.
        report: Write ``report.html`` and ``report.md``.
        preset: A published pipeline (``headprune ls`` names them), whose scorer, selector and
            recoveries take the place of those that the recipe gives.
    """

    name: Name
    description: str
    task: Task
    metric: Literal["accuracy", "matthews"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32 - 2**16)] = 0
    threads: Positive | None = None
    out: str | None = None
    model: ModelSection
    data: DataSection
    train: TrainSection | None = None
    decode: DecodeSection = DecodeSection()
    score: ScoreSection = ScoreSection()
    select: SelectSection
    gradual: GradualSection | None = None
    recover: list[RecoverStep] = []
    bench: BenchSection | None = None
    report: bool = True
    preset: str | None = None

    @property
    def folder(self) -> str:
        """The folder of the run."""
        return self.out or f"runs/{self.name}"
