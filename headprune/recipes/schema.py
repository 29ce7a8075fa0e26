"""The recipe of a run, section by section; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
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
    """The model: from a path, freshly built from a class, or from a user's function.

    Args:
        path: A local folder, a hub name, or ``package:NAME/FOLDER``, a folder inside an installed
            package.
        class_name: A Transformers class, or our own ``TransformerForTranslation``.
        import_path: ``package.module:function``, which builds an ``nn.Module``. It takes a batch by
            name (``pixel_values`` or ``input_values``) and returns logits ``[batch, labels]``.
        config: Keyword arguments of that class's configuration, or of that function.
        layouts: ``package.module:NAME`` of an ``AttentionLayout``, or a list of them, for attention
            that headprune does not know.
        dtype: Dtype of the weights; by default that of the checkpoint, and float32 for a fresh
            model.
    """

    path: str | None = None
    class_name: str | None = None
    import_path: ImportPath | None = None
    config: dict[str, Any] = {}
    layouts: ImportPath | None = None
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None


class DataSection(Section):
    """The data, its columns, and the purposes of its rows.

    Each key is described where it is declared.

    >>> DataSection(path="reviews.csv", text="review").text_columns
    ['review']
    """

    # ---- where the rows come from
    #: A hub name, a local json, jsonl, csv, tsv, parquet or txt file, a folder with
    #: train/validation/test files, or ``sklearn:digits``. A txt file is one row, column ``text``.
    path: str
    #: Configuration and revision of a hub data set; local data has none.
    subset: str | None = None
    revision: str | None = None
    #: Names of the splits; a split that is named for one purpose serves no other.
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"

    # ---- text
    #: Column or columns with text (two columns make a pair); ``a.b`` is ``b`` inside column ``a``.
    #: For token classification, lists of words. For question answering, the columns of the question
    #: and of the context that contains its answer.
    text: str | Annotated[list[str], Field(min_length=1, max_length=2)] | None = None
    #: Column with the translation of the text, or with any other text that an encoder-decoder is to
    #: write.
    target: str | None = None
    #: Put before every text of a translation, for models such as T5 that read their task there.
    prefix: str = ""
    #: Trained on the train rows, for a freshly built model on text: ``bpe`` (byte pairs, one
    #: tokenizer for both languages) or ``characters``, one token per character.
    tokenizer: Literal["bpe", "characters"] | None = None
    #: Tokens of ``bpe`` at most.
    vocabulary: Annotated[int, Field(ge=300)] | None = None
    #: For language models: join the rows of each split and cut the text into rows of so many
    #: characters. Rows for validation and test are then the end of the text, and no random draw.
    block: Annotated[int, Field(ge=2)] | None = None
    #: Column with token numbers, for language models on data that is tokenised already.
    tokens: str | None = None

    # ---- images and sound
    #: Column with images.
    image: str = "image"
    #: Column with sound: paths (from the data's folder on), ``{bytes, path}`` as in hub data sets,
    #: or ``{array, sampling_rate}``. It is resampled to the rate of the model's feature extractor.
    audio: str = "audio"
    #: Length of every clip: longer ones are cut, shorter ones filled with silence.
    seconds: Annotated[float, Field(gt=0)] | None = None

    # ---- labels
    #: Column with labels; of several names, the first that the train rows have. For question
    #: answering, the column of SQuAD's answers ``{text: [...], answer_start: [...]}``; without any
    #: text there is no answer, as in SQuAD 2.
    label: str | Annotated[list[str], Field(min_length=1)] = LABEL
    #: The label of every class of the model, in the order of its class numbers, for a model that
    #: does not name its classes or names them in another way than the data.
    labels: Annotated[list[str | int], Field(min_length=2)] | None = None

    # ---- amounts
    #: Drop rows without a text or a label, and say how many; by default such a row is an error.
    drop_incomplete: bool = False
    #: Tokens per example at most; of a question and its context, the context is cut.
    max_length: Positive | None = None
    #: Rows (or fraction) of train that become validation rows where the data has none.
    holdout: Rows = 0.1
    #: The same for test rows.
    test_holdout: Rows = 0.2
    #: Rows of train that heads are scored on; fewer where train is smaller.
    calibration: Positive = 1024
    #: Subtract the mean and divide by the standard deviation of the training images: the default
    #: for a freshly built model. A model from a path has its own image processor.
    normalise: bool | None = None

    @property
    def text_columns(self) -> list[str]:
        """The text columns as a list."""
        return [self.text] if isinstance(self.text, str) else list(self.text or [])

    @property
    def label_columns(self) -> list[str]:
        """The possible names of the label column."""
        return [self.label] if isinstance(self.label, str) else list(self.label)


class TrainSection(Section):
    """Training before anything is scored: settings of the recovery ``finetune``."""

    batch_size: Positive = 32
    epochs: Annotated[int | float, Field(gt=0)] = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    schedule: str = "linear"


class UntilSection(Section):
    """When enough rows were read; see ``headprune.Stable``.

    Args:
        k: Number of lowest units whose set must be settled.
        confidence: Probability that all rows give the same set.
    """

    k: Positive
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class ScoreSection(Section):
    """How heads are scored, and which other plans the result is compared with.

    Args:
        scorer: Registered name; ``auto`` by default.
        settings: The scorer's settings.
        batch_size: Examples per batch; no score depends on it.
        until: Stop reading calibration rows when the set of the k lowest is settled; by default
            all rows are read.
        magnitude: Also cut by weight magnitude at the same budget.
        random_draws: Number of random cuts at the same budget; up to three of them get the
            recoveries, too, where none of these trains.
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
        batch_size: Examples per batch.
        rows: ``calibration`` or ``train``; by default ``train`` for a method that trains, and
            calibration rows for others. ``auto`` refits on calibration rows in any case: more
            would take as many times as long for every plan that it tries.
        examples: At most so many of these rows, drawn by the recipe's seed; default all.
    """

    method: str
    settings: dict[str, Any] = {}
    batch_size: Positive = 32
    rows: Literal["calibration", "train"] | None = None
    examples: Positive | None = None

    def rows_of(self, trains: bool) -> str:
        """Return the purpose of the rows that the method reads."""
        return self.rows or ("train" if trains else "calibration")


class BudgetSection(Section):
    """Exactly one budget (see ``headprune.Budget``)."""

    keep_heads: int | float | None = None
    keep_params: int | float | None = None
    keep_macs: int | float | None = None
    keep_kv: int | float | None = None
    speedup: int | float | None = None
    length: Positive | None = None
    tensor_parallel: Positive | None = None

    @property
    def budget(self) -> Budget:
        """The budget.

        Raises:
            InvalidValue: none or several are given, or an impossible one.
        """
        return Budget(**{name: getattr(self, name) for name in BudgetSection.model_fields})


class LatencySection(Section):
    """How latency is measured, for the budget ``speedup``.

    Args:
        batch_size: Examples per call.
        length: Tokens per example; by default those of a small batch of test rows.
        seconds: Approximate time of the latency table, and of each comparison of a cut model.
    """

    batch_size: Positive = 32
    length: Positive | None = None
    seconds: Annotated[float, Field(gt=0)] = 30.0


def default_selector(select: Mapping[str, Any], scorer: Any = None) -> str:
    """The selector of a section that names none.

    Args:
        select: The section as it was read.
        scorer: Of the section ``score``.
    """
    # Other selectors do not read the prices that it measures.
    if scorer == "ladder":
        return "repriced"
    groups = select.get("sites")
    sections = [select, *(groups.values() if isinstance(groups, dict) else ())]
    timed = any(
        isinstance(section, dict) and section.get("speedup") is not None for section in sections
    )
    neurons = select.get("feed_forward") is True
    return "knapsack" if timed or neurons else "global_topk"


def _with_selector(select: dict[str, Any], selector: str) -> dict[str, Any]:
    """A section with its default selector, unless that is the field's own default.

    A sweep takes what a recipe sets for the user's choice, and would keep it in every combination.
    """
    return select if selector == "global_topk" else {"selector": selector, **select}


class SelectSection(BudgetSection):
    """Which heads are kept: a selector and its budget, or budgets of groups of sites.

    Args:
        selector: Registered name; see ``default_selector``.
        settings: The selector's settings.
        recover: Recoveries of the copies that the selector measures while it chooses: between the
            steps of ``iterative``, before each measurement of ``local_search``.
        must_keep: Heads that must be kept, by the sites' names.
        must_remove: Heads that must be removed, by the sites' names.
        latency: How latency is measured, with ``speedup``.
        policy: Which heads may be removed where several query heads share a key/value head (see
            ``headprune.find_sites``).
        feed_forward: Also choose among the neurons of feed-forwards, under the same budget.
        sites: Budgets by kind (self, causal, cross, feed_forward) or by a pattern over the sites'
            names. Each group meets its own budget; sites in no group keep every head.
    """

    selector: str = "global_topk"
    settings: dict[str, Any] = {}
    recover: list[RecoverStep] = []
    must_keep: dict[str, list[int]] | None = None
    must_remove: dict[str, list[int]] | None = None
    latency: LatencySection = LatencySection()
    policy: Policy = "group"
    feed_forward: bool = False
    sites: dict[str, BudgetSection] = {}

    @model_validator(mode="before")
    @classmethod
    def _default_selector(cls, data: Any) -> Any:
        return _with_selector(data, default_selector(data)) if isinstance(data, dict) else data

    @property
    def timed(self) -> bool:
        """Whether a budget is a speedup, for which latency is measured."""
        return any(section.speedup is not None for section in (self, *self.sites.values()))

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budgets of groups of sites; empty where all sites share one budget."""
        return {key: section.budget for key, section in self.sites.items()}


class GradualSection(Section):
    """Removes heads in stages while the model is trained.

    Budget and selector are those of ``select``; ``recover`` comes after. See
    ``headprune.run.prune_gradually_``.

    Args:
        stages: Number of cuts; a share of the training steps follows each.
        batch_size: Train rows per batch.
        settings: Settings of the recovery ``finetune``, for all stages together.
    """

    stages: Positive = 8
    batch_size: Positive = 32
    settings: dict[str, Any] = {}


class BenchSection(Section):
    """How speed is measured: every batch size with every length.

    Args:
        batch_sizes: Examples per call.
        lengths: Tokens per example; by default those of the scored examples. Images and sound have
            a fixed length.
        new_tokens: Also time generation of so many tokens after a prompt, for language models.
        seconds: Approximate time of each measurement.
    """

    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = [1, 32]
    lengths: Annotated[list[Positive], Field(min_length=1)] | None = None
    new_tokens: Positive | None = None
    seconds: Annotated[float, Field(gt=0)] = 2.0


class DecodeSection(Section):
    """How translations are generated for BLEU.

    Args:
        beams: Beams of the search; 1 is greedy decoding.
        max_length: Tokens per translation, at most.
    """

    beams: Positive = 1
    max_length: Positive = 64


class Recipe(Section):
    """A whole run; see ``recipes/`` for complete ones.

    Args:
        name: Name of the run and, without ``out``, of its folder ``runs/<name>``.
        description: One line for ``headprune ls``.
        task: The model's task.
        metric: For a classification: ``accuracy``, the default, or ``matthews`` for the Matthews
            correlation.
        device: ``auto`` takes a GPU where there is one.
        seed: Seed of every random draw.
        threads: CPU threads of torch; torch chooses by default.
        out: The folder of the run.
        report: Write ``report.html`` and ``report.md``.
        preset: A published pipeline (``headprune ls`` lists them), whose scorer, selector and
            recoveries replace those of the recipe.
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

    @model_validator(mode="before")
    @classmethod
    def _selector_of_ladders(cls, data: Any) -> Any:
        score, select = data.get("score"), data.get("select")
        if not isinstance(score, dict) or not isinstance(select, dict):
            return data
        selector = default_selector(select, score.get("scorer"))
        return {**data, "select": _with_selector(select, selector)}

    @property
    def folder(self) -> str:
        """The folder of the run."""
        return self.out or f"runs/{self.name}"
